"""The types of options: each refuses what can't be right when the command line is read, before anything is loaded."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from skerry.runtime.addresses import server_address, split_targets

# Of the contract's and the store's integers, and more seconds, bytes or steps than anything takes.
_HIGHEST_COUNT: Final = 2**63 - 1
_HIGHEST_NUMBER: Final = 1e9
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


class Count(click.IntRange):
    """A whole number that fits into 64 bits."""

    def __init__(self, min: int = 0, max: int | None = None) -> None:  # noqa: A002 - click's names
        super().__init__(min, max)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number."""
        number = super().convert(value, param, ctx)
        if number > _HIGHEST_COUNT:
            self.fail(f"{number} is too large.", param, ctx)
        return number


class Number(click.FloatRange):
    """A finite number."""

    def __init__(self, min: float = 0, max: float | None = None, *, min_open: bool = False) -> None:  # noqa: A002 - click's names
        super().__init__(min, max, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the number."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):  # which is within every range
            self.fail(f"{value} is not a number.", param, ctx)
        if number > _HIGHEST_NUMBER:
            self.fail(f"{value} is too large.", param, ctx)
        return number


class FilledPath(click.Path):
    """A path that is not blank."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Returns the path."""
        text = os.fspath(value)
        if not text.strip() or "\0" in text:
            self.fail(f"{text!r} is no path.", param, ctx)
        try:
            path = Path(os.fsdecode(super().convert(value, param, ctx)))
            path.exists()
            return self.checked(path, param, ctx)
        except OSError as error:  # a name that is too long
            self.fail(f"{text[:100]!r} can't be used: {error.strerror}.", param, ctx)

    def checked(self, path: Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Returns the path if it can be used."""
        return path


class _Output(FilledPath):
    """A place to write to: there is a folder, and it may be changed."""

    def checked(self, path: Path, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Returns the path if its folder can be written to, or with `file_okay` False be made."""
        folder = path.absolute() if not self.file_okay else path.absolute().parent
        while not self.file_okay and not folder.exists() and folder != folder.parent:
            folder = folder.parent
        code = 0
        if not folder.is_dir():
            code = errno.ENOTDIR if folder.exists() else errno.ENOENT
        elif not os.access(folder, os.W_OK | os.X_OK):
            code = errno.EACCES
        if code:
            self.fail(f"can't be written: {os.strerror(code)}. path={path}, folder={folder}", param, ctx)
        return path


def _served(text: str) -> str:
    server_address(text)
    return text


TARGET: Final = Parsed("target", lambda text: ",".join(split_targets(text)))
ADDRESS: Final = Parsed("address", _served)
INPUT_FILE: Final = FilledPath(exists=True, dir_okay=False, path_type=Path)
INPUT_FOLDER: Final = FilledPath(exists=True, file_okay=False, path_type=Path)
INPUT: Final = FilledPath(exists=True, path_type=Path)
# A folder for files of a command, which it does not make.
EXISTING_FOLDER: Final = FilledPath(exists=True, file_okay=False, writable=True, path_type=Path)
OUTPUT: Final = _Output(writable=True, path_type=Path)
OUTPUT_FILE: Final = _Output(dir_okay=False, writable=True, path_type=Path)
OUTPUT_FOLDER: Final = _Output(file_okay=False, writable=True, path_type=Path)


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
