"""Every option and argument of every command is given what can't be right: status 2 and one line, before it begins.

All cases run in one process in which torch can't be imported and no host can be reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click
import pytest

from skerry.runtime.options import ADDRESS, TARGET, FilledPath
from tests.unit.cli.test_command import every_command

_LIMIT_S: Final = 2.0  # a machine that is loaded takes longer than the milliseconds of a quiet one

_TEXTS: Final = ("", " ", "a b", "../x", "a/b/c/d", "\x01", "ü", "x" * 5000)
_NUMBERS: Final = ("", " ", "x", "-1", "nan", "inf", "-inf", "1e400", "9" * 30, "1e300", "0x10", "1 2")
_PATHS: Final = ("", " ", "x" * 5000)
# Texts that are right for an option of this name, though no name or address.
_RIGHT: Final = {"--store": {"ü"}}

# Reads a list of argument lists, and prints of each its status, its errors and how long it took.
_RUN = """
import io, json, signal, socket, sys, time
from contextlib import redirect_stderr, redirect_stdout

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

def refuse(*_):
    raise AssertionError("a connection was tried")

def hurry(*_):
    raise TimeoutError("it goes on")

sys.meta_path.insert(0, Blocked())
signal.signal(signal.SIGALRM, hurry)
socket.socket.connect = refuse
from skerry.cli.main import cli
from skerry.cli import failures
for words in (["--help"], *([name, "--help"] for name in cli.list_commands(None))):
    with redirect_stdout(io.StringIO()):
        failures.run(cli, words)  # imports are not counted
for line in sys.stdin:
    signal.alarm(4)
    begun_s, said = time.monotonic(), io.StringIO()
    with redirect_stderr(said), redirect_stdout(said):
        try:
            status = int(failures.run(cli, json.loads(line)))
        except BaseException as error:
            status = repr(error)[:300]
    signal.alarm(0)
    print(json.dumps([status, said.getvalue(), time.monotonic() - begun_s]), flush=True)
"""


def senseless(param: click.Parameter, folder: Path) -> Iterator[str]:
    """Yields values that can't be right for a parameter."""
    kind = param.type
    if isinstance(kind, FilledPath):
        yield from _PATHS
        yield str(folder / "file" / "below")
        if kind.exists:
            yield str(folder / "missing")
        elif not kind.file_okay:
            yield str(folder / "file")
        else:
            yield str(folder / "missing" / "file")
        if not kind.dir_okay:
            yield str(folder)
        if os.geteuid() != 0:
            yield str(folder / "locked" / "file")
    elif isinstance(kind, click.IntRange | click.FloatRange):
        yield from _NUMBERS
        if kind.min or kind.min_open:
            yield "0"
    elif isinstance(kind, click.Choice):
        yield from _TEXTS
    elif param.name == "assignments":
        yield from (*_TEXTS, "inner_step_count=nan", "inner_step_count=-1", "=", "lease_term=inf", "merge=x")
    else:
        yield from _TEXTS
        yield from ("-", "/etc/passwd", "127.0.0.1:99999", "http://127.0.0.1:1", "²", "9" * 5000)
        if kind in (ADDRESS, TARGET):
            yield from ("127.0.0.1", "127.0.0.1:-1", "::1:443", ":443", "a:1,,b:1")


def required(command: click.Command, but: click.Parameter, folder: Path) -> list[str]:
    """Returns right values for what the command needs besides one parameter."""
    words: list[str] = []
    for param in command.params:
        if param is but:
            continue
        if param.name == "run" or (param.name == "ids" and param.required):
            words.append("demo" if param.name == "run" else "abc")
        elif isinstance(param, click.Argument):
            words.append(str(folder / "made"))
        elif param.required:
            words += [param.opts[0], _needed(param, folder)]
    return words


def _needed(param: click.Parameter, folder: Path) -> str:
    if isinstance(param.type, click.Choice):
        return str(param.type.choices[0])
    if isinstance(param.type, click.IntRange):
        return "1"
    if isinstance(param.type, FilledPath):
        return str(folder / ("file" if param.type.exists else "new"))
    return "name"


def filed(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yields every command and parameter that a settings file may have, with values of the file that can't be right."""
    for words, command in every_command():
        for param in command.params:
            if (isinstance(param, click.Argument) and param.envvar is None) or param.name == "yes":
                continue
            key = param.opts[0].removeprefix("--")
            values = ["[[1]]", "1979-05-27", "{ a = 1 }"]
            values += ["nan", "-inf"] if isinstance(param.type, click.IntRange | click.FloatRange) else []
            values += ['""'] if getattr(param, "is_flag", False) else []
            for value in values:
                file = folder / "files" / f"{'-'.join(words)}-{key}-{values.index(value)}.toml"
                file.parent.mkdir(exist_ok=True)
                file.write_text(f"[{'.'.join(words)}]\n{key} = {value}\n")
                yield " ".join(words), param.opts[0], ["--config", str(file), *words, *required(command, param, folder)]


def every_case(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yields every command and parameter with its cases."""
    for words, command in every_command():
        for param in command.params:
            if getattr(param, "is_flag", False):
                continue
            for value in senseless(param, folder):
                if value in _RIGHT.get(param.opts[0], ()):
                    continue
                if isinstance(param, click.Argument):
                    given = [*words, *required(command, param, folder), "--", value]
                else:
                    given = [*words, *required(command, param, folder), f"{param.opts[0]}={value}"]
                yield " ".join(words), param.opts[0], given


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a file and a folder that nobody may change."""
    folder = tmp_path_factory.mktemp("senseless")
    (folder / "file").write_bytes(b"{}")
    (folder / "locked").mkdir(mode=0o500)
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[tuple[str, str], list[tuple[list[str], Any, str, float]]]:
    """Returns what every command said to every senseless value, by command and parameter."""
    cases = [*every_case(folder), *filed(folder)]
    lines = "".join(json.dumps(given) + "\n" for _, _, given in cases)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
    done = subprocess.run(
        [sys.executable, "-c", _RUN],
        input=lines,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == len(cases), done.stderr
    found: dict[tuple[str, str], list[tuple[list[str], Any, str, float]]] = {}
    for (command, name, given), (status, shown, duration_s) in zip(cases, said, strict=True):
        found.setdefault((command, name), []).append((given, status, shown, duration_s))
    assert sorted(path.name for path in folder.iterdir()) == ["file", "files", "locked"], "nothing was written"
    return found


EVERY_PARAMETER = [
    pytest.param(" ".join(words), param.opts[0], id=f"{' '.join(words)} {param.opts[0]}")
    for words, command in every_command()
    for param in command.params
    if param.name != "yes"
]


@pytest.mark.parametrize(("command", "name"), EVERY_PARAMETER)
def test_what_can_not_be_right_is_refused_in_one_line_before_anything_is_loaded(
    command: str, name: str, answers: dict[tuple[str, str], list[tuple[list[str], Any, str, float]]]
) -> None:
    wrong = []
    for given, status, shown, duration_s in answers[command, name]:
        lines = [line for line in shown.splitlines() if not line.startswith(("Usage: ", "next: "))]
        is_one_line = len(lines) == 1 and lines[0].startswith("error: ")
        if status != 2 or not is_one_line or duration_s > _LIMIT_S:
            wrong.append(f"{' '.join(given)[:200]}: {status} in {duration_s:.1f} s\n{shown[-500:]}")
    assert not wrong, "\n".join(wrong)
