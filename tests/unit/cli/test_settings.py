"""An option's value: the flag, else the environment, else the file's table, else its top level, else the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from skerry.cli import settings


def make_group() -> click.Group:
    """Returns a group with a command, and a group inside it, that print what they were given."""

    @click.group()
    def root() -> None:
        pass

    @root.command()
    @click.option("--target", default="here")
    @click.option("--steps", type=int, default=1)
    @click.option("--yes", is_flag=True)
    def learn(**values: Any) -> None:
        click.echo(values)

    @root.group()
    def runs() -> None:
        pass

    @runs.command("list")
    @click.option("--target", default="here")
    @click.option("--json", "is_json", is_flag=True)
    def list_(**values: Any) -> None:
        click.echo(values)

    settings.name_environment(root)
    return root


def invoke(arguments: list[str], file: dict[str, Any] | None = None, env: dict[str, str] | None = None) -> Result:
    root = make_group()
    default_map = settings.defaults(file or {}, root.commands)
    return CliRunner().invoke(root, arguments, default_map=default_map, env=env, standalone_mode=False)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file_which_wins_over_the_default() -> None:
    file = {"target": "top-level", "learn": {"target": "table"}}
    env = {"SKERRY_TARGET": "environment"}
    assert "'target': 'flag'" in invoke(["learn", "--target", "flag"], file, env).output
    assert "'target': 'environment'" in invoke(["learn"], file, env).output
    assert "'target': 'table'" in invoke(["learn"], file).output
    assert "'target': 'top-level'" in invoke(["learn"], {"target": "top-level"}).output
    assert "'target': 'here'" in invoke(["learn"]).output
    assert "'yes': False" in invoke(["learn"], env={"SKERRY_YES": "1"}).output, "consent is not taken from elsewhere"


def test_a_groups_table_counts_for_its_commands_and_their_own_table_wins() -> None:
    file = {"steps": 7, "target": "top-level", "runs": {"target": "group", "list": {"json": True}}}
    assert invoke(["runs", "list"], file).output == "{'target': 'group', 'is_json': True}\n"
    file = {"runs": {"target": "group", "list": {"target": "own"}}}
    assert "'target': 'own'" in invoke(["runs", "list"], file).output


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ({"stepz": 7}, "stepz"),
        ({"learn": {"stepz": 7}}, "learn.stepz"),
        ({"runs": {"list": {"steps": 7}}}, "runs.list.steps"),
        ({"lern": {"steps": 7}}, "lern"),
        ({"learn": {"yes": True}}, "learn.yes"),
        ({"learn": {"steps": [7]}}, "key=steps"),
        ({"learn": {"target": {"host": "there"}}}, "key=target"),
    ],
)
def test_a_key_or_a_value_that_no_option_has_is_an_error_that_names_it(file: dict[str, Any], named: str) -> None:
    with pytest.raises(click.UsageError) as refused:
        settings.defaults(file, make_group().commands)
    assert named in refused.value.format_message()


def test_help_shows_the_variable_and_the_default() -> None:
    output = " ".join(CliRunner().invoke(make_group(), ["learn", "--help"]).output.split())
    assert "env var: SKERRY_TARGET" in output
    assert "default: here" in output


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
