"""The value of an option: from the flag, else the environment, else a TOML file, else its default."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from skerry.cli.unavailable import UnavailableCommand

DEFAULT_FILE = Path("skerry.toml")
_PREFIX = "SKERRY_"
# Never taken from the environment or a file. Consent (--yes) must be given each time.
_FLAGS_ONLY = frozenset({"help", "version", "config", "yes"})


def name_environment(command: click.Command) -> None:
    """Gives each option without an environment variable the variable `SKERRY_<OPTION>`, and shows it with the default.

    Idempotent. Changes the command in place, its subcommands too.
    """
    for option in _options(command):
        if option.envvar is None:
            option.envvar = _PREFIX + _long_name(option).replace("-", "_").upper()
        option.show_envvar = True
        if option.show_default is None and not _explains_default(option):
            option.show_default = True
    if isinstance(command, click.Group):
        for child in command.commands.values():
            name_environment(child)


def read_file(path: Path | None) -> Mapping[str, Any]:
    """Returns the settings in a TOML file; without a path those in ./skerry.toml, or none if it does not exist.

    Raises:
        click.UsageError: the file can't be read, or is not TOML.
    """
    if path is None:
        if not DEFAULT_FILE.is_file():
            return {}
        path = DEFAULT_FILE
    try:
        data = path.read_bytes()
        return tomllib.loads(data.decode(json.detect_encoding(data)))  # editors write UTF-16, and byte order marks
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        raise click.UsageError(f"settings can't be read. file={path}, because={error}") from error


def defaults(file: Mapping[str, Any], root: click.Group, ctx: click.Context, name: str) -> dict[str, Any]:
    """Returns the defaults of the command `name`, as click's default map: its table's values before the top level's.

    A top-level key applies to every command that has the option. A key that no command has is an error, unless a
    command that can't be loaded here may have it.

    Raises:
        click.UsageError: keys or tables that no command has; the message names them.
    """
    general = {key: value for key, value in file.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in file.items() if isinstance(value, Mapping)}
    unknown = [f"[{table}]" for table in tables if table not in root.list_commands(ctx)]
    command = root.get_command(ctx, name)
    assert command is not None, "click has resolved the name"
    if isinstance(command, UnavailableCommand):
        return {}
    unknown += [key for key in general if not _anyone_has(key, root, ctx)]
    result, strangers = _fill(command, tables.get(name, {}), general, path=name)
    if unknown or strangers:
        raise click.UsageError(
            f"the settings file has keys that are no option. keys={', '.join([*unknown, *strangers])}"
        )
    return result


def _fill(
    command: click.Command, table: Mapping[str, Any], inherited: Mapping[str, Any], *, path: str
) -> tuple[dict[str, Any], list[str]]:
    """Returns the default map of a command and its subcommands, and the keys of `table` that are no option."""
    children = command.commands if isinstance(command, click.Group) else {}
    below = {key: value for key, value in table.items() if key in children and isinstance(value, Mapping)}
    own = {key: value for key, value in table.items() if key not in below}
    known = {key for key in own if any(_find(candidate, key) for candidate in _tree(command))}
    strangers = [f"{path}.{key}" for key in own if key not in known]
    given = {**inherited, **own}
    result: dict[str, Any] = {}
    for key, value in given.items():
        option = _find(command, key)
        if option is not None and option.name is not None:
            result[option.name] = _value(option, key, value)
    for name, child in children.items():
        result[name], more = _fill(child, below.get(name, {}), given, path=f"{path}.{name}")
        strangers += more
    return result, strangers


def _value(option: click.Parameter, key: str, value: Any) -> Any:
    """Returns a value of the file as the command line would have it.

    Raises:
        click.UsageError: no option has such a value.
    """
    if getattr(option, "multiple", False) and isinstance(value, list):
        return [_scalar(key, item, is_flag=False) for item in value]
    return _scalar(key, value, is_flag=getattr(option, "is_flag", False))


def _scalar(key: str, value: Any, *, is_flag: bool) -> Any:
    if isinstance(value, bool if is_flag else int | float):
        return value if is_flag else str(value)
    if isinstance(value, str) and (value or not is_flag):
        return value
    kind = "true or false" if is_flag else "a text or a number"
    raise click.UsageError(f"the settings file has a value that is not {kind}. key={key}, value={str(value)[:80]}")


def _anyone_has(key: str, root: click.Group, ctx: click.Context) -> bool:
    commands = [command for name in root.list_commands(ctx) if (command := root.get_command(ctx, name)) is not None]
    candidates = [candidate for command in commands for candidate in _tree(command)]
    return any(isinstance(one, UnavailableCommand) or _find(one, key) is not None for one in candidates)


def _tree(command: click.Command) -> Iterator[click.Command]:
    yield command
    if isinstance(command, click.Group):
        for child in command.commands.values():
            yield from _tree(child)


def _options(command: click.Command) -> list[click.Option]:
    options = [found for found in command.params if isinstance(found, click.Option)]
    return [option for option in options if _long_name(option) not in _FLAGS_ONLY]


def _find(command: click.Command, key: str) -> click.Parameter | None:
    """Returns the option with the long name `key`, written with - or _, or the argument that may be set elsewhere."""
    arguments = [found for found in command.params if isinstance(found, click.Argument) and found.envvar is not None]
    wanted = key.replace("_", "-")
    named = [*((_long_name(option), option) for option in _options(command)), *((one.name, one) for one in arguments)]
    return next((found for name, found in named if name == wanted), None)


def _long_name(option: click.Option) -> str:
    """Returns an option's first long name without its dashes."""
    return next((name[2:] for name in option.opts if name.startswith("--")), option.name or "")


def _explains_default(option: click.Option) -> bool:
    return "[default:" in (option.help or "")
