"""Everything that reads bytes from others: a decoder, right inputs to begin with, and the errors that it documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import grpc
import msgspec
import numpy as np
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from skerry.errors import CorruptDownloadError
from skerry.exchange.adopt import PlanApplier
from skerry.net.grpc_transport import error_from_rpc
from skerry.runtime.workers import InlineWorkers
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import types_pb2 as types
from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec, WireError
from skerry.wire.frames import encode_frames
from skerry.wire.identity import Identity
from skerry.wire.messages import layouts_from_messages, layouts_to_messages, policy_from_message, policy_to_message
from skerry.wire.policy import Gate, Policy
from skerry.wire.safetensors import TensorFileReader, header_bytes, tensor_bytes
from skerry_syncer.errors import SyncerError
from skerry_syncer.rounds.leases import Leases
from skerry_syncer.rpc.translate import report_from_message
from skerry_syncer.run.events import learner_message
from skerry_syncer.run.parts import ArrivingPart
from skerry_syncer.store import store
from skerry_syncer.store.errors import LogCorruptError, NewerFormatError
from skerry_syncer.store.log.checkpoints import state_from_bytes, state_to_bytes
from skerry_syncer.store.log.entries import Entry, RunSpec
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.retention import kept_names, oldest_versions
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.versions.blobs import Blobs
from tests.fuzz.mutations import mutated_bytes, mutated_frames, mutated_json, mutated_message, pick
from tests.support.decoding import decode_frames
from tests.support.dict_objects import DictObjects
from tests.support.seeded_entropy import SeededEntropy
from tests.unit.exchange import test_adopt as course

Make = Callable[[Random], bytes]
_GOLDEN: Final = Path(__file__).parents[1] / "unit/syncer/store/golden/store/runs/golden"
_LAYOUT: Final = FragmentLayout(
    "body",
    (TensorSpec("a", (8, 32)), TensorSpec("__metadata__", (7,)), TensorSpec("scale", ()), TensorSpec("b", (16, 16))),
)


@dataclass(frozen=True)
class Decoder:
    """One reader of bytes from others."""

    name: str
    make: Make  # returns an input that is seldom right
    decode: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]  # that it documents


def _json(*values: Any) -> Make:
    return lambda source: mutated_json(source, pick(source, values), values)


def _bytes(*values: bytes) -> Make:
    return lambda source: mutated_bytes(source, pick(source, values), values)


def _messages(*messages: Message) -> Make:
    def make(source: Random) -> bytes:
        data = mutated_message(source, pick(source, messages), messages).SerializeToString()
        return mutated_bytes(source, data) if source.random() < 0.05 else data

    return make


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


# Frames, files and parts.


@cache
def _frames() -> tuple[tuple[bytes, ...], ...]:
    values = np.random.default_rng(1).standard_normal(_LAYOUT.numel).astype(np.float32)
    return tuple(
        tuple(encode_frames(values, _LAYOUT, Encoding(codec, block=block, vector_codec=vector, compressor=compressor)))
        for codec in Codec
        for block, vector in ((16, Codec.FLOAT32), (128, codec))
        for compressor in Compressor
    )


def _make_frames(source: Random) -> bytes:
    return mutated_frames(source, pick(source, _frames()))


def _decode_frames(data: bytes) -> None:
    decode_frames(data, _LAYOUT, np.empty(_LAYOUT.numel, np.float32))


def _pieces(data: bytes) -> Iterable[bytes]:
    size = 1 + len(data) % 97 * 8
    return (data[at : at + size] for at in range(0, len(data), size))


def _decode_part(data: bytes) -> object:
    part = ArrivingPart(_LAYOUT, 0, _LAYOUT.numel, codecs=frozenset(Codec), limit_bytes=len(data))
    for piece in _pieces(data):
        part.feed(piece)
    return part.finish()


@cache
def _tensor_file() -> tuple[Any, bytes]:
    header = header_bytes({spec.name: ("float32", spec.shape) for spec in _LAYOUT.tensors}, {"format": "1"})
    return json.loads(header[8:]), b"".join(tensor_bytes(np.ones(_LAYOUT.numel, np.float32)))


def _make_tensor_file(source: Random) -> bytes:
    """Returns a file with a changed header, of which sometimes anything else is changed as well."""
    tree, values = _tensor_file()
    text = mutated_json(source, tree)
    size = len(text) + (source.randrange(-3, 4) if source.random() < 0.1 else 0)
    data = max(size, 0).to_bytes(8, "little") + text + values
    return mutated_bytes(source, data, [data]) if source.random() < 0.3 else data


def _decode_tensor_file(data: bytes) -> None:
    reader = TensorFileReader(_LAYOUT, np.empty(_LAYOUT.numel, np.float32), first=0, numel=_LAYOUT.numel)
    for piece in _pieces(data):
        reader.feed(piece)
    reader.finish()


_PART_NAME: Final = f"p/deltas/body/{'1' * 32}/0-8-{'2' * 64}-{'3' * 32}"
_PART_HEADER: Final = {
    "format": 1,
    "fragment": "body",
    "delta": "1" * 32,
    "first": 0,
    "numel": 8,
    "digest": "2" * 64,
    "squared_norms": [1.0, 0.5],
}


def _decode_part_header(data: bytes) -> object:
    objects = DictObjects()
    objects.objects[_PART_NAME] = (data, 0.0)
    blobs = Blobs(objects, "p", SeededEntropy(Random(0)), workers=InlineWorkers(), condemned=())
    return _loop().run_until_complete(blobs.list_parts("body", "1" * 32))


# The log.


class _Golden(NamedTuple):
    """The golden run: its entries, and the state and the digest that each of them follows."""

    spec_data: bytes
    spec: RunSpec
    trees: tuple[Any, ...]
    states: tuple[bytes, ...]
    heads: tuple[str, ...]


@cache
def _golden() -> _Golden:
    (spec_path,) = _GOLDEN.glob("*/run.json")
    spec = RunSpec.from_bytes(spec_path.read_bytes())
    entries = [path.read_bytes() for path in sorted((spec_path.parent / "log").iterdir())]
    state, states, heads = RunState(spec), [], []
    for entry in entries:
        states.append(state_to_bytes(state))
        heads.append(state.head_digest)
        apply_entry(state, Entry.from_bytes(entry), entry)
    return _Golden(spec_path.read_bytes(), spec, tuple(map(json.loads, entries)), tuple(states), tuple(heads))


def _make_step(source: Random) -> bytes:
    """Returns an entry that follows its predecessor, most of whose items are nearly those that came then."""
    golden = _golden()
    index = int(source.random() * len(golden.trees))
    items = list(golden.trees[index]["items"])
    while source.random() < 0.3:
        items.insert(0, pick(source, pick(source, golden.trees)["items"]))
    changed = msgspec.Raw(mutated_json(source, items, [tree["items"] for tree in golden.trees]))
    following = {"position": index + 1, "previous": golden.heads[index], "run_uid": golden.spec.uid, "format": 1}
    return msgspec.json.encode(golden.trees[index] | following | {"items": changed})


def _apply_step(data: bytes) -> object:
    """Applies an entry to the state that it follows, and asks the state what every replica asks of it."""
    golden = _golden()
    entry = Entry.from_bytes(data)
    if not 1 <= entry.position <= len(golden.states):
        raise LogCorruptError("no such position")
    state = state_from_bytes(golden.states[entry.position - 1], golden.spec)
    apply_entry(state, entry, data)
    kept_names(state, state.policy)
    oldest_versions(state)
    return state_to_bytes(state)


_ADVICE: Final = {
    "format": 1,
    "learner": "us",
    "session": "5" * 32,
    "beat": 3,
    "report": {
        "step_count": 10,
        "token_count": 100,
        "step_time_s": 0.5,
        "loss": 2.5,
        "sent_bytes": 1,
        "received_bytes": 2,
        "adopted": [["body", 3]],
        "stall_time_s": 0.1,
    },
}


@cache
def _last_state() -> RunState:
    return state_from_bytes(_golden().states[-1], _golden().spec)


def _decode_advice(data: bytes) -> object:
    """Hears another replica's advice and asks the membership what a round engine asks of it."""
    state = _last_state()
    learner = next(iter(state.learners))
    membership = Leases(0.0)
    membership.renew(learner, state.learners[learner].session, 1.0)
    membership.unpublished()
    try:
        membership.hear(learner, data.replace(b"5" * 32, state.learners[learner].session.encode()), 2.0)
    finally:
        membership.view(state, 3.0)
        for known in state.learners.values():
            learner_message(known, membership.view(state, 3.0).of(known.learner), is_participating=True)
        membership.renew(learner, state.learners[learner].session, 4.0)
        membership.unpublished()
    return membership.next_change_s(state, 3.0)


# Policies.


_POLICIES: Final = (
    Policy(),
    Policy(quorum_count=2, merge_by_fragment={}, pinned_positions=(3, 9), planned_token_count=10**6),
    Policy(delta_encoding=Encoding(Codec.INT8, block=64), delay_step_count=3, kept_hours=0.5, enrols_by_run=True),
    Policy(gate=Gate("eval", "loss", 0.1, rolls_back=True)),
)


# Messages.


def _run_message() -> types.Run:
    layouts = (_LAYOUT, FragmentLayout("head", (TensorSpec("h", (4, 5)),)))
    tensors, fragments = layouts_to_messages(layouts, {})
    return types.Run(name="demo", uid="0" * 32, tensors=tensors, fragments=fragments)


def _decode_layouts(data: bytes) -> object:
    message = types.Run.FromString(data)
    layouts, dtypes = layouts_from_messages(message.tensors, message.fragments)
    return [(layout.bounds, layout.numel) for layout in layouts if layout.numel < 2**40], dtypes


def _report() -> types.LearnerReport:
    report = types.LearnerReport(step_count=3, token_count=9, loss=1.5, sent_bytes=1, received_bytes=2)
    report.step_time.FromMilliseconds(20)
    report.stall_time.FromMilliseconds(2)
    report.adopted.add(fragment="body", version=2)
    return report


def _status() -> status_pb2.Status:
    status = status_pb2.Status(code=9, message="no")
    info = error_details_pb2.ErrorInfo(reason="BASE_STALE", domain="skerry", metadata={"run_uid": "0" * 32})
    for detail in (info, error_details_pb2.RetryInfo(retry_delay=Duration(seconds=3))):
        status.details.add().Pack(detail)
    return status


def _decode_status(data: bytes) -> object:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", data))
    return error_from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), trailing, "no", ""))


def _make_pull(source: Random) -> bytes:
    """Returns a plan and the bytes of its objects, each with its length before it."""
    plan, objects = course.plan_with(course.WEIGHTS, 4), [data for _, data in course.OBJECTS]
    if source.random() < 0.6:
        index = int(source.random() * len(objects))
        objects[index] = mutated_frames(source, [objects[index]])
    if source.random() < 0.6:
        plan = mutated_message(source, plan)
    return b"".join(len(piece).to_bytes(4, "little") + piece for piece in (plan.SerializeToString(), *objects))


def _decode_pull(data: bytes) -> object:
    pieces, rest = [], data
    while rest:
        size = 4 + int.from_bytes(rest[:4], "little")
        pieces.append(rest[4:size])
        rest = rest[size:]
    applier = PlanApplier(course.LAYOUT, exchange.PullPlan.FromString(pieces[0]), course.START)
    for index, piece in enumerate(pieces[1:]):
        for offset in range(0, len(piece), 300):
            applier.feed(index, offset, piece[offset : offset + 300])
    return applier.finish().tobytes()


def _decoders() -> Iterable[Decoder]:
    golden, corrupt = _golden(), (LogCorruptError, NewerFormatError)
    uris = (b"skerry://learner/us-east", b"skerry://learner/run/us", b"skerry://admin/anna", b"skerry://reader/x")
    policies = tuple(json.loads(msgspec.json.encode(policy.to_json())) for policy in _POLICIES)
    yield Decoder("frames", _make_frames, _decode_frames, (WireError,))
    yield Decoder("part", _make_frames, _decode_part, (SyncerError, WireError))
    yield Decoder("part-header", _json(_PART_HEADER), _decode_part_header, ())
    yield Decoder("safetensors", _make_tensor_file, _decode_tensor_file, (WireError,))
    yield Decoder("pull", _make_pull, _decode_pull, (CorruptDownloadError, DecodeError))
    yield Decoder("run.json", _json(json.loads(golden.spec_data)), partial(store._parse_spec, "run.json"), corrupt)
    yield Decoder("entry", _json(*golden.trees), Entry.from_bytes, (ValueError, NewerFormatError))
    yield Decoder("fold", _make_step, _apply_step, (*corrupt, ValueError))
    yield Decoder(
        "checkpoint",
        _json(*map(json.loads, golden.states)),
        lambda data: state_from_bytes(data, golden.spec),
        (ValueError, NewerFormatError),
    )
    yield Decoder("name", _json({"format": 1, "uid": "0" * 32}), partial(store._parse_name, "demo"), corrupt)
    yield Decoder("advice", _json(_ADVICE), _decode_advice, (ValueError,))
    yield Decoder("identity", _bytes(*uris), lambda data: Identity.parse(data.decode(errors="replace")), (ValueError,))
    yield Decoder(
        "policy-json",
        _json(*policies),
        lambda data: Policy.from_json(json.loads(data)),
        (ValueError, RecursionError),
    )
    yield Decoder(
        "policy-message",
        _messages(*map(policy_to_message, _POLICIES)),
        lambda data: policy_to_message(policy_from_message(types.Policy.FromString(data), _POLICIES[1])),
        (ValueError, DecodeError),
    )
    yield Decoder("layouts", _messages(_run_message()), _decode_layouts, (ValueError, DecodeError))
    yield Decoder(
        "report",
        _messages(_report()),
        lambda data: report_from_message(types.LearnerReport.FromString(data), {"body", "head"}),
        (SyncerError, DecodeError),
    )
    yield Decoder("status", _messages(_status()), _decode_status, ())


DECODERS: Final = {decoder.name: decoder for decoder in _decoders()}
