"""The `skerry` command itself: finds commands, joins flags, environment and file, and turns failures into statuses."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from skerry.cli import failures, settings
from skerry.cli.unavailable import UnavailableCommand

ENTRY_POINT_GROUP = "skerry.commands"

_EPILOG = """\b
Examples:
  skerry demo                          three islands, two kills, one page
  skerry serve --store file://data     a syncer on this machine
  skerry learn --run demo              an island that trains with it
  skerry watch demo                    how the run goes, live

\b
Every option may also be given in the environment or in a TOML file. Flags win over the environment, it over
the file's [command] table, that over the file's top level:
  target = "syncer.example:443"        for every command that has --target
  [runs.list]
  json = true                          for one command

\b
Exit status: 0 done; 1 done, and the answer is no (or a failure of no other kind); 2 wrong usage;
3 refused, and will be again; 4 unreachable or busy, try again; 5 something must be installed; 130 interrupted.
"""


class CommandGroup(click.Group):
    """A group whose commands are the entry points of `skerry.commands`, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns every command's name, in alphabetical order."""
        return sorted(_entry_points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command with its environment variables named; one that can't be imported says so when it is run."""
        entry_point = _entry_points().get(cmd_name)
        if entry_point is None:
            return None
        try:
            command = entry_point.load()
        except ImportError as error:
            return UnavailableCommand(cmd_name, error)
        assert isinstance(command, click.Command), f"{entry_point.value} is not a click command"
        settings.name_environment(command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that `args` name, after the file's settings were laid below it."""
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None and command is not None:
            ctx.default_map = {name: settings.defaults(self._file(ctx), self, ctx, name)}
        return name, command, rest

    def _file(self, ctx: click.Context) -> Mapping[str, Any]:
        return settings.read_file(ctx.params.get("config"))


def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {found.name: found for found in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


@click.group(cls=CommandGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="SKERRY_CONFIG",
    show_envvar=True,
    help="A TOML file with settings.  [default: ./skerry.toml, if there]",
)
@click.version_option(package_name="skerry", message="skerry %(version)s")
def cli(config: Path | None) -> None:
    """Train one model on islands of compute joined by ordinary internet links."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits the process with its status."""
    # gRPC tells of every connection that closes, in the middle of tables; what matters comes back as an error.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(failures.run(cli, arguments))


if __name__ == "__main__":
    main()
