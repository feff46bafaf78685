"""Every option and argument of every command is given what can't be right: status 2 and one line, before it begins."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from skerry.cli import failures
from skerry.cli.main import cli
from skerry.runtime.options import ADDRESS, TARGET, FilledPath
from tests.unit.cli.test_command import every_command

_TEXTS: Final = ("", " ", "a b", "../x", "a/b/c/d", "\x01", "ü", "x" * 5000)
_WORDS: Final = (*_TEXTS, "-", "/etc/passwd", "127.0.0.1:99999", "http://127.0.0.1:1", "²", "9" * 5000)
_ADDRESSES: Final = ("127.0.0.1", "127.0.0.1:-1", "::1:443", ":443", "a:1,,b:1")
_ASSIGNMENTS: Final = ("inner_step_count=nan", "inner_step_count=-1", "=", "lease_term=inf", "merge=x")
_NUMBERS: Final = ("", " ", "x", "-1", "nan", "inf", "-inf", "1e400", "9" * 30, "1e300", "0x10", "1 2")
# Texts that are right for an option of this name, though no name or address.
_RIGHT: Final = {
    "--store": {"ü"},
    "--webhook": {"http://127.0.0.1:1"},
    "--organisation": {text for text in _WORDS if text.strip() and text.isprintable() and len(text) <= 64},
}


def wrong_values(param: click.Parameter, folder: Path) -> Iterable[str]:
    """Returns values that can't be right for a parameter."""
    kind = param.type
    if isinstance(kind, FilledPath):
        missing = "missing" if kind.exists else "file" if not kind.file_okay else "missing/file"
        paths = ["file/below", missing, *([] if kind.dir_okay else ["."]), *(["locked/file"] if os.geteuid() else [])]
        return ["", " ", "x" * 5000, *(str(folder / path) for path in paths)]
    if isinstance(kind, click.IntRange | click.FloatRange):
        return [*_NUMBERS, "0"] if kind.min or kind.min_open else _NUMBERS
    if isinstance(kind, click.Choice):
        return _TEXTS
    if param.name == "assignments":
        return (*_TEXTS, *_ASSIGNMENTS)
    if kind is ADDRESS:
        return (*_WORDS, *_ADDRESSES, "192.0.2.1:9464")  # which is not this machine's
    return (*_WORDS, *_ADDRESSES) if kind is TARGET else _WORDS


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


def test_what_can_not_be_right_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    (tmp_path / "locked").mkdir(mode=0o500)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # whose import fails then: nothing has loaded it by this time
    for words in cases(tmp_path):
        status = failures.run(cli, words)
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if not line.startswith(("Usage: ", "next: "))]
        assert (status, len(lines), lines[0][:7]) == (2, 1, "error: "), f"{' '.join(words)[:200]}: {said[-500:]}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "locked"], "nothing was written"
