"""Prints the page about the commands, made of what `--help` says, for `docs/site/build.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import click

from skerry.cli.main import cli

_WIDTH = 100


def sections(command: click.Command, path: tuple[str, ...], parent: click.Context | None = None) -> Iterator[str]:
    """Yields a section of Markdown for a command, and then those of its subcommands."""
    context = command.make_context(path[-1], [], parent, resilient_parsing=True, max_content_width=_WIDTH)
    context.terminal_width = _WIDTH
    yield f"## {' '.join(path)}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from sections(found, (*path, name), context)


if __name__ == "__main__":
    sys.stdout.write("# Commands\n\nWhat `skerry --help` says, and `--help` of each command.\n\n")
    sys.stdout.write("\n".join(sections(cli, ("skerry",))))
