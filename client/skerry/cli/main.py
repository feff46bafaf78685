"""The `skerry` command: finds its subcommands, combines flags, environment and file, and sets the exit status."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import os
import sys
from pathlib import Path

import click

from skerry.cli import failures, settings

ENTRY_POINT_GROUP = "skerry.commands"

_EPILOG = """\b
Examples:
  skerry serve --new-store             a syncer on this machine
  skerry learn demo                    a learner that trains with it
  skerry watch demo                    the run's progress, live

\b
Every option may also be set in the environment or in a TOML file. A flag takes precedence over the environment,
the environment over the file's [command] table, and that over the file's top level:
  target = "syncer.example:443"        for every command that has --target
  [runs.list]
  json = true                          for one command

\b
Exit status: 0 success; 1 a check failed, or any other failure; 2 wrong usage; 3 refused, so change the request;
4 unreachable or busy, so try again; 5 a package is missing; 130 interrupted;
143 `learn` was told to stop by SIGTERM before its steps were done.
"""


class CommandGroup(click.Group):
    """A group whose commands are the entry points of `skerry.commands`, each imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the names of all commands, in alphabetical order."""
        return sorted(_entry_points())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns a command with its environment variables named."""
        return _loaded(cmd_name) if cmd_name in _entry_points() else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Returns the command that `args` name, with defaults from the settings file."""
        name, command, rest = super().resolve_command(ctx, args)
        if file := settings.read_file(ctx.params.get("config")):
            ctx.default_map = settings.defaults(file, every_command())
        return name, command, rest


def every_command() -> dict[str, click.Command]:
    """Returns all commands by name."""
    return {name: _loaded(name) for name in sorted(_entry_points())}


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry_point.name: entry_point for entry_point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _loaded(name: str) -> click.Command:
    command: click.Command = _entry_points()[name].load()
    settings.name_environment(command)
    return command


@click.group(cls=CommandGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar="SKERRY_CONFIG",
    show_envvar=True,
    help="A TOML file with settings.  [default: ./skerry.toml, if it exists]",
)
@click.version_option(package_name="skerry", message="skerry %(version)s")
def cli(config: Path | None) -> None:
    """Train one model on several machines or clusters that are connected by ordinary internet links."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits the process with its status."""
    # gRPC logs connections that close or fail, in the middle of tables; failures are reported as errors anyway.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal and pipe takes what names and tables have
    status = failures.run(cli, arguments)
    if "obstore" in sys.modules:
        # Its threads may still hold an answer. One that asks for the interpreter's lock while that is being torn down
        # aborts the process (pyo3-async-runtimes#40), so nothing is torn down.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
