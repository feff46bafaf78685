"""What the documents say to type can be typed, and what they point to is there."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from skerry.cli.main import cli

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
DOCUMENTS += sorted((ROOT / "docs" / "guides").glob("*.md"))

FOLDERS = ("benchmarks", "client", "core", "docs", "examples", "protos", "services", "tests")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.md")))]
# Tables, pictures with their descriptions, and links can't be wrapped.
UNWRAPPED = re.compile(r"\||\s*!?\[|\s*<|\S+$")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_line_of_a_page_is_longer_than_120_columns(page: Path) -> None:
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in text.splitlines() if len(line) > 120 and not UNWRAPPED.match(line)] == []


def code_lines(document: Path) -> Iterator[str]:
    """Yields every line of the shell code blocks of a document, without its comment."""
    for block in re.findall(r"^```sh\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        yield from (line.partition(" #")[0].strip() for line in block.splitlines())


def skerry_lines() -> list[str]:
    lines = [line for document in DOCUMENTS for line in code_lines(document)]
    return [line for line in lines if line.startswith("skerry ")]


@pytest.mark.parametrize("line", skerry_lines())
def test_every_command_line_of_the_documents_is_understood(line: str) -> None:
    words = shlex.split(line)[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="skerry")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_context(context.info_name, list(words), parent=context.parent)


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "docs" / "integrations.md"], ids=lambda path: path.name)
def test_every_link_into_the_tree_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_every_make_target_that_the_documents_name_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    named = {name for document in DOCUMENTS for name in re.findall(r"`make ([a-z0-9-]+)", document.read_text("utf-8"))}
    assert named
    assert named <= targets


@pytest.mark.parametrize(
    "target", re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
)
def test_a_virtual_environment_that_make_did_not_make_is_touched_by_no_target(target: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "docs/site/requirements.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    done = subprocess.run(["make", "-n", target], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert not re.search(r"(?<![\w/])\.venv(?![\w-])", done.stdout)


def test_the_site_is_built_without_the_environment_of_the_tests() -> None:
    done = subprocess.run(["make", "-n", "-W", "pyproject.toml", "docs"], cwd=ROOT, capture_output=True, text=True)  # noqa: PLW1510
    assert done.returncode == 0
    assert ".venv" not in done.stdout


def test_how_to_schedule_the_inner_rate_is_said_once_and_in_the_same_words() -> None:
    said = [
        re.findall(
            r"^> \*\*The inner learning rate\.\*\*.*\n(?:> .*\n)*", page.read_text(encoding="utf-8"), re.MULTILINE
        )
        for page in (ROOT / "README.md", ROOT / "docs/learning.md", ROOT / "docs/integrations.md")
    ]
    assert [len(boxes) for boxes in said] == [1, 1, 1]
    assert said[0] == said[1] == said[2]
