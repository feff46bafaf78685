"""The learner's guide says of every error what the client does, and names the metadata that the contract names."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest

from skerry import errors
from skerry.errors import error_of
from skerry.net.grpc_transport import error_from_rpc
from skerry.v1 import types_pb2

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "learner-guide.md"
CONTRACT = ROOT / "protos" / "skerry" / "v1" / "types.proto"
REASONS = {name.removeprefix("ERROR_REASON_") for name in types_pb2.ErrorReason.DESCRIPTOR.values_by_name}

# What the guide's words for acts are to this project's client.
ACTS = {
    "retry": errors.TryAgainError,
    "attach": errors.AttachAgainError,
    "resend": errors.WorkRefusedError,
    "replace": errors.PoisonedError,
    "plan": errors.PlanExpiredError,
    "snapshot": errors.CorruptDownloadError,
    "close": errors.RunClosedError,
    "stop": errors.StopExchangingError,
    "wait": errors.StoreLostError,
    "create": errors.RunNotFoundError,
    "join": errors.RunExistsError,
    "correct": errors.RefusedError,
}


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of the guide's table that begins with that cell."""
    text = GUIDE.read_text("utf-8")
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_guide_has_every_reason_and_says_what_the_client_does() -> None:
    acts = {row[0]: row[1] for row in rows("reason")}
    assert acts.keys() == REASONS - {"UNSPECIFIED"}
    assert {reason: ACTS[act] for reason, act in acts.items()} == {
        reason: type(error_of(reason, "")) for reason in acts
    }


def test_the_guide_explains_every_act() -> None:
    assert [row[0] for row in rows("act")] == list(ACTS)


def test_the_guide_says_what_the_client_makes_of_statuses_without_a_reason() -> None:
    for name, act in ((row[0], row[1]) for row in rows("status") if row[0] != "any other"):
        error = grpc.aio.AioRpcError(grpc.StatusCode[name], grpc.aio.Metadata(), grpc.aio.Metadata(), "a proxy's", None)
        assert type(error_from_rpc(error)) is ACTS[act], name


@pytest.mark.parametrize("row", rows("reason"), ids=lambda row: row[0])
def test_guide_and_contract_name_the_same_metadata(row: list[str]) -> None:
    text = CONTRACT.read_text("utf-8")
    (comment,) = re.findall(rf"((?:  //.*\n)+)  ERROR_REASON_{row[0]} = ", text)
    words = re.sub(r"\s*//\s*", " ", comment)
    assert re.findall(r"[Mm]etadata `(\w+)`", words) == re.findall(r"`(\w+)`", row[2])


@pytest.mark.parametrize("document", [GUIDE, *sorted((ROOT / "protos").glob("*.md"))], ids=lambda path: path.name)
def test_every_link_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []
