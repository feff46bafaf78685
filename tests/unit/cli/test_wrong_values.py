"""Every option and argument of every command is given what can't be right: status 2 and one line, before it begins.

All cases run in one process in which torch can't be imported and no host can be reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import click

from skerry.runtime.options import ADDRESS, TARGET, FilledPath
from tests.unit.cli.test_command import every_command

_TEXTS: Final = ("", " ", "a b", "../x", "a/b/c/d", "\x01", "ü", "x" * 5000)
_WORDS: Final = (*_TEXTS, "-", "/etc/passwd", "127.0.0.1:99999", "http://127.0.0.1:1", "²", "9" * 5000)
_ADDRESSES: Final = ("127.0.0.1", "127.0.0.1:-1", "::1:443", ":443", "a:1,,b:1")
_ASSIGNMENTS: Final = ("inner_step_count=nan", "inner_step_count=-1", "=", "lease_term=inf", "merge=x")
_NUMBERS: Final = ("", " ", "x", "-1", "nan", "inf", "-inf", "1e400", "9" * 30, "1e300", "0x10", "1 2")
# Texts that are right for an option of this name, though no name or address.
_RIGHT: Final = {"--store": {"ü"}}

# Reads a list of argument lists, and prints of each its status and its errors. A case may take 4 s.
_RUN: Final = """
import io, json, signal, socket, sys
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
from skerry.cli.main import cli, every_command
from skerry.cli import failures
every_command()
for line in sys.stdin:
    signal.alarm(4)
    with redirect_stderr(io.StringIO()) as said, redirect_stdout(said):
        try:
            status = int(failures.run(cli, json.loads(line)))
        except BaseException as error:
            status = repr(error)[:300]
    signal.alarm(0)
    print(json.dumps([status, said.getvalue()]), flush=True)
"""


def wrong_values(param: click.Parameter, folder: Path) -> Iterable[str]:
    """Returns values that can't be right for a parameter."""
    kind = param.type
    if isinstance(kind, FilledPath):
        missing = "missing" if kind.exists else "file" if not kind.file_okay else "missing/file"
        paths = ["file/below", missing, *([] if kind.dir_okay else ["."]), *(["locked/file"] if os.geteuid() else [])]
        return ["", " ", *(str(folder / path) for path in paths)]
    if isinstance(kind, click.IntRange | click.FloatRange):
        return [*_NUMBERS, "0"] if kind.min or kind.min_open else _NUMBERS
    if isinstance(kind, click.Choice):
        return _TEXTS
    if param.name == "assignments":
        return (*_TEXTS, *_ASSIGNMENTS)
    return (*_WORDS, *_ADDRESSES) if kind in (ADDRESS, TARGET) else _WORDS


def required(command: click.Command, but: click.Parameter, folder: Path) -> Iterator[str]:
    """Yields right values for what the command needs besides one parameter."""
    for param in command.params:
        if param is but or not (param.required or isinstance(param, click.Argument)):
            continue
        if isinstance(param, click.Option):
            yield param.opts[0]
        if isinstance(param.type, FilledPath):
            yield str(folder / ("file" if param.type.exists else "new"))
        else:
            yield "1" if isinstance(param.type, click.IntRange) else "abc"


def cases(folder: Path) -> Iterator[list[str]]:
    """Yields the arguments of every case."""
    for words, command in every_command():
        for param in command.params:
            others, name = list(required(command, param, folder)), param.opts[0]
            if not getattr(param, "is_flag", False):
                for value in wrong_values(param, folder):
                    given = ["--", value] if isinstance(param, click.Argument) else [f"{name}={value}"]
                    if value not in _RIGHT.get(name, ()):
                        yield [*words, *others, *given]


def test_what_can_not_be_right_is_refused_in_one_line_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    (tmp_path / "locked").mkdir(mode=0o500)
    every_case = list(cases(tmp_path))
    answers = subprocess.run(
        [sys.executable, "-c", _RUN], input="".join(json.dumps(given) + "\n" for given in every_case),
        env={name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    wrong = []
    for given, (status, said) in zip(every_case, map(json.loads, answers), strict=True):
        lines = [line for line in said.splitlines() if not line.startswith(("Usage: ", "next: "))]
        if status != 2 or len(lines) != 1 or not lines[0].startswith("error: "):
            wrong.append(f"{' '.join(given)[:200]}: {status}\n{said[-500:]}")
    assert not wrong, "\n".join(wrong)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "locked"], "nothing was written"
