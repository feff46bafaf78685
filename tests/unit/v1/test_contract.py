"""The contract reads and compiles as the guide says, and its comments say what the code does."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from google.rpc import code_pb2

from skerry.v1 import capabilities_pb2, exchange_pb2, runs_pb2, types_pb2
from skerry_syncer.errors import SyncerError
from skerry_syncer.rpc.status import status_of

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "client-guide.md"
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
OPTIONS = ('go_package = "skerry/v1;skerryv1"', "java_multiple_files = true", 'java_package = "skerry.v1"')
REASONS = {name.removeprefix("ERROR_REASON_") for name in types_pb2.ErrorReason.DESCRIPTOR.values_by_name} - {
    "UNSPECIFIED"
}


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_no_line_is_longer_than_120_columns(path: Path) -> None:
    lines = enumerate(path.read_text("utf-8").splitlines(), 1)
    assert [number for number, line in lines if len(line) > 120] == []


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_every_file_says_what_generators_call_its_package(path: Path) -> None:
    options = re.findall(r"^option (.*);$", path.read_text("utf-8"), re.MULTILINE)
    assert options == list(OPTIONS)


def test_every_method_lists_its_errors_one_a_bullet_with_its_cause() -> None:
    listed = {}
    for path in PROTOS:
        for comment, name in re.findall(
            r"((?:^ *//.*\n)+) *(?:rpc|service) (\w+)", path.read_text("utf-8"), re.MULTILINE
        ):
            if " Errors" not in comment:
                continue
            text = re.sub(r"^ *// ?", "", comment, flags=re.MULTILINE)
            heading, _, bullets = text.partition("Errors")[2].partition("\n")
            assert heading in {":", " of every method:", ": those of every method."}, name
            found = re.findall(r"^- ([A-Z_]+): [a-z].*(?:\n  .*)*\.$", bullets, re.MULTILINE)
            assert len(found) == bullets.count("\n- ") + bullets.startswith("- "), (name, bullets)
            assert set(found) <= REASONS, name
            listed[name] = found
    methods = {
        method.name
        for module in (capabilities_pb2, exchange_pb2, runs_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods <= listed.keys()
    assert {reason for reasons in listed.values() for reason in reasons} == REASONS


def test_every_reason_has_the_status_code_that_its_comment_says() -> None:
    text = (ROOT / "protos" / "skerry" / "v1" / "types.proto").read_text("utf-8")
    comments = re.findall(r"  // ([A-Z_]+): .*\n(?:  //.*\n)*  ERROR_REASON_(\w+) = ", text)
    said = {reason: code for code, reason in comments}
    assert said.keys() == REASONS
    assert said == {reason: code_pb2.Code.Name(status_of(SyncerError(reason, "")).code) for reason in REASONS}


def _recipe() -> list[list[str]]:
    (block,) = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [shlex.split(line) for line in block.splitlines()]


@pytest.mark.parametrize("words", [line for line in _recipe() if "protoc" in " ".join(line)], ids=lambda line: line[-2])
def test_the_recipe_compiles_the_contract(words: list[str], tmp_path: Path) -> None:
    generators = {word[2:].partition("_out=")[0] for word in words if "_out=" in word}
    built_in = {"java", "python", "grpc_python"}
    missing = [name for name in generators - built_in if shutil.which(f"protoc-gen-{name}") is None]
    if words[0] == "protoc" and (missing or shutil.which("protoc") is None):
        pytest.skip(f"protoc or a generator is not installed: {missing}")
    (tmp_path / "gen").mkdir()
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    sources = [str(path.relative_to(ROOT)) for path in PROTOS]
    program = [sys.executable, *words[1:]] if words[0] == "python" else words
    subprocess.run([*program[:-1], *sources], cwd=tmp_path, check=True)
    assert len(list((tmp_path / "gen" / "skerry" / "v1").iterdir())) >= 2 * len(PROTOS)
    if words[0] == "python":
        packages = str(Path(grpc.__file__).parents[1])
        code = f"import sys; sys.path[:0] = ['gen', {packages!r}]; import skerry.v1.exchange_pb2_grpc"
        subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, check=True)
