"""The value of an option: from the flag, else the environment, else a TOML file, else its default."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

DEFAULT_FILE = Path("skerry.toml")
# Never taken from the environment or a file. Consent (--yes) must be given each time.
_FLAGS_ONLY = frozenset({"help", "version", "config", "yes"})


def name_environment(command: click.Command) -> None:
    """Gives each option without an environment variable the variable `SKERRY_<OPTION>`, and shows it with the default.

    Idempotent. Changes the command in place, its subcommands too.
    """
    for child in _tree(command):
        for key, option in _settable(child).items():
            if isinstance(option, click.Option):
                option.envvar = option.envvar or f"SKERRY_{key.replace('-', '_').upper()}"
                option.show_envvar = True
                if option.show_default is None and "[default:" not in (option.help or ""):
                    option.show_default = True


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


def defaults(file: Mapping[str, Any], commands: Mapping[str, click.Command]) -> dict[str, Any]:
    """Returns the settings of a file as click's default map: a command's table before the tables around it.

    A key applies to every command below its table that has the option. One that none of them has is an error.

    Raises:
        click.UsageError: keys or tables that no command has; the message names them.
    """
    result, strangers = _fill(click.Group(commands=dict(commands)), file, {}, "")
    if strangers:
        raise click.UsageError(f"the settings file has keys that are no option. keys={', '.join(strangers)}")
    return result


def _fill(
    command: click.Command, table: Mapping[str, Any], inherited: Mapping[str, Any], path: str
) -> tuple[dict[str, Any], list[str]]:
    """Returns the default map of a command and its subcommands, and the keys of `table` that are no option."""
    children = command.commands if isinstance(command, click.Group) else {}
    below = {key: value for key, value in table.items() if key in children and isinstance(value, Mapping)}
    own = {key.replace("_", "-"): value for key, value in table.items() if key not in below}
    strangers = [path + key for key in own if not any(key in _settable(child) for child in _tree(command))]
    merged, settable = {**inherited, **own}, _settable(command)
    result: dict[str, Any] = {
        str(settable[key].name): _value(settable[key], key, value) for key, value in merged.items() if key in settable
    }
    for name, child in children.items():
        result[name], more = _fill(child, below.get(name, {}), merged, f"{path}{name}.")
        strangers += more
    return result, strangers


def _value(parameter: click.Parameter, key: str, value: Any) -> Any:
    """Returns a value of the file as the command line would have it.

    Raises:
        click.UsageError: no option has such a value.
    """
    is_list = isinstance(value, list) and getattr(parameter, "multiple", False)
    items = value if is_list else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        raise click.UsageError(f"the settings file has a value that no option has. key={key}, value={value!r:.80}")
    texts = list(map(str, items))
    return texts if is_list else texts[0]


def _tree(command: click.Command) -> Iterator[click.Command]:
    yield command
    for child in command.commands.values() if isinstance(command, click.Group) else ():
        yield from _tree(child)


def _settable(command: click.Command) -> dict[str, click.Parameter]:
    """Returns what may be set outside the command line: options by their long names, and arguments with a variable."""
    settable: dict[str, click.Parameter] = {}
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            key = next((name[2:] for name in parameter.opts if name.startswith("--")), "")
            if key not in _FLAGS_ONLY:
                settable[key] = parameter
        elif parameter.envvar is not None:
            settable[str(parameter.name)] = parameter
    return settable
