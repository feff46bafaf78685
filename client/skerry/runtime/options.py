"""The types of options: each refuses what can't be right when the command line is read, before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from skerry.runtime.addresses import check_free, server_address, split_targets

_MISSING: Final = "the run is missing. Name it as the argument, in SKERRY_RUN, or as run in the settings file"

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType  # older versions have no generic one


class Parsed(_ParamType):
    """A text that `parse` reads, or refuses with a ValueError whose message is shown."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns what `parse` made of the text."""
        if not isinstance(value, str):  # a default, or a value of a settings file
            value = str(value)
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class _Bounded(_ParamType):
    """A number that is neither NaN nor larger than `highest`."""

    highest: float

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number."""
        number = super().convert(value, param, ctx)
        if not number <= self.highest:
            self.fail(f"{value} is too large.", param, ctx)
        return number


class Count(_Bounded, click.IntRange):
    """A whole number that fits into 64 bits."""

    highest = 2**63 - 1


class Number(_Bounded, click.FloatRange):
    """A finite number."""

    highest = 1e9  # more seconds, bytes or steps than anything takes


class FilledPath(click.Path):
    """A path that is not blank; one that is to be written, and need not exist, has a folder that may be changed."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the path."""
        if not os.fspath(value).strip():
            self.fail(f"{value!r} is no path.", param, ctx)
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        try:
            path.exists()
        except OSError as error:  # a name that is too long
            self.fail(f"{str(path)[:100]!r} can't be used: {error.strerror}.", param, ctx)
        if self.writable and not self.exists:
            folder = path.absolute()
            if self.file_okay:
                folder = folder.parent
            while not self.file_okay and not folder.exists():  # a folder is made with those above it
                folder = folder.parent
            if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
                self.fail(f"can't be written: no folder that may be changed. path={path}, folder={folder}", param, ctx)
        return path


def _served(text: str) -> str:
    try:
        check_free(server_address(text))
    except OSError as error:
        because = f"because={error.strerror}. Is another syncer running there?"
        raise ValueError(f"can't listen on the address. address={text}, {because}") from error
    return text


TARGET: Final = Parsed("target", lambda text: ",".join(split_targets(text)))
ADDRESS: Final = Parsed("address", _served)
INPUT_FILE: Final = FilledPath(exists=True, dir_okay=False)
INPUT_FOLDER: Final = FilledPath(exists=True, file_okay=False)
INPUT: Final = FilledPath(exists=True)
# A folder for files of a command, which it does not make.
EXISTING_FOLDER: Final = FilledPath(exists=True, file_okay=False, writable=True)
OUTPUT: Final = FilledPath(writable=True)
OUTPUT_FILE: Final = FilledPath(dir_okay=False, writable=True)
OUTPUT_FOLDER: Final = FilledPath(file_okay=False, writable=True)


def run_argument(
    check: Callable[[str], str], *, default: str | None = None, is_optional: bool = False
) -> Callable[[F], F]:
    """Returns what gives a command its run as an argument, which SKERRY_RUN and the settings file may name too."""
    return click.argument(
        "run",
        metavar="[RUN]",
        type=Parsed("run", check),
        envvar="SKERRY_RUN",
        required=False,
        default=default,
        callback=None if is_optional else _given,
    )


def _given(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str:
    if value is None:
        raise click.UsageError(_MISSING)
    return value
