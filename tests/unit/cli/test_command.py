"""The command as a whole: what every part of it owes its user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from skerry.cli import failures, main, settings
from skerry.cli.main import cli


def leaves(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yields every command below one with its words."""
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from leaves(child, (*path, name))
    else:
        yield path, command


def every_command() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in main.every_command().items():
        yield from leaves(command, (name,))


EVERY_COMMAND = [pytest.param(words, command, id=" ".join(words)) for words, command in every_command()]


@pytest.mark.parametrize(("words", "command"), EVERY_COMMAND)
def test_every_option_and_the_run_have_a_variable_and_a_key_in_the_settings_file(
    words: tuple[str, ...], command: click.Command
) -> None:
    for parameter in command.params:
        if parameter.name == "yes" or (isinstance(parameter, click.Argument) and parameter.name != "run"):
            continue
        assert str(parameter.envvar).startswith("SKERRY_"), f"{words} {parameter.opts}"
        assert getattr(parameter, "show_envvar", True), f"{words} {parameter.opts}"
        key = next((name[2:] for name in parameter.opts if name.startswith("--")), parameter.name)
        table: dict[str, Any] = {str(key): "said"}
        for word in reversed(words):
            table = {word: table}
        for file in ({str(key): "said"}, table):
            defaults: Any = settings.defaults(file, main.every_command())
            for word in words:
                defaults = defaults[word]
            assert defaults[parameter.name] == "said", f"{words} {key}"


def test_a_run_is_the_first_argument_and_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words, command in every_command():
        arguments = [param.name for param in command.params if isinstance(param, click.Argument)]
        assert "run" not in arguments[1:], words
        assert not any("--run" in param.opts for param in command.params), words
    assert failures.run(cli, ["runs", "show"]) == failures.ExitStatus.USAGE
    assert "the run is missing. Name it as the argument, in SKERRY_RUN" in capsys.readouterr().err


def test_a_settings_file_with_a_typing_error_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('traget = "there"\n[runs.list]\njsn = true\n', encoding="utf-8")
    assert failures.run(cli, ["--config", str(file), "runs", "list"]) == failures.ExitStatus.USAGE
    shown = capsys.readouterr().err
    assert "traget" in shown
    assert "runs.list.jsn" in shown


@pytest.mark.parametrize("words", [[], ["runs"]])
def test_a_group_by_itself_prints_its_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert failures.run(cli, words) == failures.ExitStatus.DONE
    shown = capsys.readouterr()
    assert shown.out.startswith("Usage: skerry")
    assert "Commands:" in shown.out
    assert shown.err == ""


def test_a_terminal_without_a_character_shows_something_else() -> None:
    script = "import skerry.cli.main as m\ntry: m.main(['--version'])\nfinally: print('Z\u00fcrich \u6771\u4eac')"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, check=True)
    assert b"Z?rich ??" in shown.stdout
