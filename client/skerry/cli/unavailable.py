"""A placeholder for a command that can't be imported: it is still listed, and says what it needs."""

from __future__ import annotations

import click


class UnavailableCommand(click.Command):
    """Takes any arguments, even --help, and fails with the error of the import."""

    def __init__(self, name: str, error: ImportError) -> None:
        def fail(**_: object) -> None:
            raise error

        super().__init__(
            name,
            callback=fail,
            params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
            context_settings={"ignore_unknown_options": True, "help_option_names": []},
            short_help=f"(can't be loaded: {error})",
        )
