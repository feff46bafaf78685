"""`python -m skerry.cli`: the same as `skerry`."""

from skerry.cli.main import main

if __name__ == "__main__":
    main()
