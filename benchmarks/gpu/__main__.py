"""Runs the GPU benchmark: `python -m benchmarks.gpu`, or some of its parts by name."""

from __future__ import annotations

import sys

from benchmarks.gpu.needs import unmet


def main() -> None:
    """Says what is missing, or runs."""
    missing, others = unmet()
    if missing:
        sys.exit(f"not installed: {' '.join(missing)}. benchmarks/gpu/README.md says how")
    if others:
        sys.stderr.write(f"in another version than is asked for: {', '.join(others)}\n")
    from benchmarks.gpu.command import command

    command()


if __name__ == "__main__":
    main()
