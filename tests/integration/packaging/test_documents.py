"""What the documents say to type can be typed, and the loop of the README trains."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skerry import RunsClient
from skerry.cli.main import cli
from tests.support.syncer_thread import syncer

ROOT = Path(__file__).parents[3]
FOLDERS = [ROOT, ROOT / "docs", ROOT / "docs" / "operating"]
DOCUMENTS = [*(path for folder in FOLDERS for path in folder.glob("*.md")), ROOT / "docker" / "README.md"]


def command_lines(word: str) -> list[str]:
    """Returns the command lines of all documents that begin with a word, without their comments."""
    return [line for document in DOCUMENTS for line in _code_lines(document) if line.startswith(f"{word} ")]


def _code_lines(document: Path) -> Iterator[str]:
    for block in re.findall(r"^```sh\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        yield from (line.partition(" #")[0].strip() for line in block.replace("\\\n", "").splitlines())


@pytest.mark.parametrize("line", command_lines("skerry"))
def test_every_command_line_of_the_documents_is_understood(line: str) -> None:
    words = shlex.split(line)[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="skerry")
    while isinstance(command, click.Group):
        name, found, words = command.resolve_command(context, words)
        assert found is not None
        command, context = found, click.Context(found, info_name=name, parent=context)
    command.make_context(context.info_name, list(words), parent=context.parent)


def test_the_loop_of_the_readme_trains_and_its_steps_are_merged() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(2000, 4)
    model = nn.Linear(4, 1)
    names = {
        "model": model,
        "loader": DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=20),
        "loss_function": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    loop = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )[0]
    with syncer() as target:
        exec(loop.replace("127.0.0.1:50051", target), names)
        with RunsClient(target) as client:
            assert {version.version for version in client.get_run("gpt").run.versions} != {0}


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
