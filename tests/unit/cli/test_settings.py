"""An option's value: the flag, else the environment, else the file's table, else its top level, else the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from skerry.cli import main, settings

FILE = {"target": "top:1", "runs": {"target": "group:1", "list": {"target": "own:1"}}}


def values(command: str, *arguments: str, file: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the values that a command of `skerry runs` is given."""
    runs = main.every_command()["runs"]
    assert isinstance(runs, click.Group)
    defaults = settings.defaults(file or {}, main.every_command())["runs"][command]
    return runs.commands[command].make_context(command, list(arguments), default_map=defaults).params


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert values("list")["target"] == "127.0.0.1:50051"
    assert (
        values("list", file={"target": "top:1", "json": True}).items() >= {"target": "top:1", "is_json": True}.items()
    )
    assert values("show", "fit", file=FILE)["target"] == "group:1"
    assert values("list", file=FILE)["target"] == "own:1"
    monkeypatch.setenv("SKERRY_TARGET", "environment:1")
    assert values("list", file=FILE)["target"] == "environment:1"
    assert values("list", "--target", "flag:1", file=FILE)["target"] == "flag:1"
    monkeypatch.setenv("SKERRY_YES", "1")
    assert not values("delete", "fit")["yes"], "consent is not taken from elsewhere"


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ({"stepz": 7}, "stepz"),
        ({"learn": {"stepz": 7}}, "learn.stepz"),
        ({"runs": {"list": {"steps": 7}}}, "runs.list.steps"),
        ({"lern": {"steps": 7}}, "lern"),
        ({"runs": {"delete": {"yes": True}}}, "runs.delete.yes"),
        ({"learn": {"steps": [7]}}, "key=steps"),
        ({"learn": {"target": {"host": "there"}}}, "key=target"),
    ],
)
def test_a_key_or_a_value_that_no_option_has_is_an_error_that_names_it(file: dict[str, Any], named: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        settings.defaults(file, main.every_command())
    assert named in refused.value.format_message()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_a_file_is_read_in_every_encoding_that_editors_write(
    encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert settings.read_file(None) == {}
    (tmp_path / "skerry.toml").write_bytes('region = "Zürich"\n'.encode(encoding))
    assert settings.read_file(None) == settings.read_file(tmp_path / "skerry.toml") == {"region": "Zürich"}


@pytest.mark.parametrize("data", [b'region = "Z\xfcrich"', b"\xff\xfe\x00", b"target = "])
def test_a_file_that_is_no_toml_is_refused_in_one_line(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "skerry.toml"
    path.write_bytes(data)
    with pytest.raises(click.UsageError) as refused:
        settings.read_file(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
