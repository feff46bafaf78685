"""Every decoder answers wrong bytes with an error that it documents, in bounded time and memory.

`python -m tests.fuzz` looks for longer. What it found lies in `corpus/<decoder>` and is read again here.
"""

from __future__ import annotations

import faulthandler
import os
import time
from pathlib import Path
from random import Random

import pytest

from skerry.v1 import types_pb2
from skerry_syncer.rpc import runs
from tests.fuzz.campaign import check, hunt
from tests.fuzz.conversations import against_syncer
from tests.fuzz.decoders import DECODERS, Decoder
from tests.fuzz.mutations import mutated_message

SECONDS = 0.5
CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("name", DECODERS)
def test_what_was_found_once_is_answered_as_documented(name: str) -> None:
    decoder = DECODERS[name]
    for path in sorted((CORPUS / name).glob("*")):
        _, took_s, wrong = check(decoder, path.read_bytes())
        assert not wrong, (path.name, wrong, took_s)


@pytest.mark.parametrize("name", DECODERS)
def test_wrong_bytes_do_no_harm(name: str) -> None:
    """The seed is always the same, so that the suite does not depend on luck; `python -m tests.fuzz` takes others."""
    result = hunt(DECODERS[name], "1", SECONDS)
    assert not result.findings
    assert result.inputs > 10


@pytest.mark.parametrize("name", [name for name in DECODERS if name not in {"part-header", "status"}])
def test_inputs_are_neither_all_right_nor_all_wrong(name: str) -> None:
    """A decoder that refused all of them at its first look would not have been tested."""
    decoder, source = DECODERS[name], Random(5)
    accepted = [check(decoder, decoder.make(source))[0] for _ in range(200)]
    assert 2 <= sum(accepted) <= 198


def test_maps_of_any_kind_are_changed() -> None:
    source = Random(1)
    policy = types_pb2.Policy(merge_by_fragment={"a": types_pb2.MERGE_RULE_MEAN})
    rules = [mutated_message(source, policy).merge_by_fragment for _ in range(500)]
    assert len({rule for by_fragment in rules for rule in by_fragment.values()}) > 1


def _faulty(fault: str) -> Decoder:
    def decode(data: bytes) -> None:
        if data[0] < 8:
            return
        match fault:
            case "error":
                raise KeyError("x")
            case "memory":
                bytearray(2**30)
            case "time":
                began_s = time.thread_time()
                while time.thread_time() - began_s < 1.1:
                    pass
            case "crash":
                faulthandler.disable()  # what it says is no trouble of this test
                os.abort()

    return Decoder(fault, lambda source: source.randbytes(2), decode, (ValueError,))


@pytest.mark.parametrize(
    ("fault", "told"),
    [("error", "KeyError"), ("memory", "MemoryError"), ("time", "took 1."), ("crash", "process ended by SIGABRT")],
)
def test_a_fault_is_found_and_its_input_is_known(fault: str, told: str) -> None:
    result = hunt(_faulty(fault), "1", 0.5)
    (finding,) = result.findings
    assert finding.what.startswith(told)
    assert finding.data[0] >= 8


def test_wrong_conversations_do_no_harm() -> None:
    result = against_syncer("1", 8.0)
    assert not result.findings
    assert result.inputs


def test_a_fault_of_a_method_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyError("x")

    monkeypatch.setattr(runs, "set_policy", fail)
    assert "Runs/SetPolicy: INTERNAL" in {finding.what for finding in against_syncer("0", 0.1).findings}
