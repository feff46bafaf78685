"""Everything that reads bytes from others: a decoder, right inputs to begin with, and the errors that it documents."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import click
import grpc
import msgspec
import numpy as np
from blake3 import blake3
from google.protobuf.message import DecodeError, Message

from skerry.cli import policy_text, settings
from skerry.cli.main import cli
from skerry.errors import CorruptDownloadError
from skerry.exchange.adopt import PlanApplier
from skerry.net.grpc_transport import error_from_rpc
from skerry.runtime.clock import SystemClock
from skerry.runtime.workers import InlineWorkers
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import types_pb2 as types
from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec, WireError
from skerry.wire.frames import decode_frames, encode_frames
from skerry.wire.identity import Identity
from skerry.wire.messages import layouts_from_messages, layouts_to_messages, policy_from_message, policy_to_message
from skerry.wire.policy import Policy
from skerry.wire.safetensors import TensorFileReader, header_bytes, tensor_bytes
from skerry_syncer.errors import SyncerError
from skerry_syncer.rounds.leases import Leases
from skerry_syncer.rounds.membership import LearnerReport
from skerry_syncer.rpc.translate import report_from_message
from skerry_syncer.run.events import learner_message
from skerry_syncer.run.parts import ArrivingPart
from skerry_syncer.store import store
from skerry_syncer.store.errors import LogCorruptError, NewerFormatError
from skerry_syncer.store.log.entries import Entry, RunSpec
from skerry_syncer.store.log.fold import apply_entry
from skerry_syncer.store.log.horizon import oldest_versions
from skerry_syncer.store.log.retention import Retention, kept_names
from skerry_syncer.store.log.saved import state_from_bytes, state_to_bytes
from skerry_syncer.store.log.state import RunState
from skerry_syncer.store.versions.blobs import Blobs
from tests.fuzz.mutations import mutated_bytes, mutated_frames, mutated_json, mutated_message, pick
from tests.support.dict_objects import DictObjects
from tests.support.seeded_entropy import SeededEntropy
from tests.unit.exchange.test_adopt import LAYOUT as COURSE_LAYOUT
from tests.unit.exchange.test_adopt import Course

T = TypeVar("T")
Make = Callable[[Random], bytes]
_GOLDEN: Final = Path(__file__).parents[1] / "unit" / "syncer" / "store" / "golden"
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


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that never waits, without the cost of a loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]  # a coroutine's result
    raise AssertionError("the coroutine waited")


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
    tree, data = _tensor_file()
    text = mutated_json(source, tree)
    size = len(text) + (source.randrange(-3, 4) if source.random() < 0.1 else 0)
    return mutated_ends(source, max(size, 0).to_bytes(8, "little") + text + data)


def mutated_ends(source: Random, data: bytes) -> bytes:
    """Returns `data`, sometimes cut, longer or changed anywhere."""
    chance = source.random()
    if chance < 0.1:
        return data[: int(source.random() * len(data))]
    if chance < 0.2:
        return data + data[: int(source.random() * len(data))]
    return mutated_bytes(source, data) if chance < 0.3 else data


def _decode_tensor_file(data: bytes) -> None:
    reader = TensorFileReader(_LAYOUT, np.empty(_LAYOUT.numel, np.float32), first=0, numel=_LAYOUT.numel)
    for piece in _pieces(data):
        reader.feed(piece)
    reader.finish()


_CLOCK, _ENTROPY, _WORKERS = SystemClock(), SeededEntropy(Random(0)), InlineWorkers()
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
    blobs = Blobs(objects, "p", _ENTROPY, workers=_WORKERS, condemned=())
    return _loop().run_until_complete(blobs.list_parts("body", "1" * 32))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


# The log.


@dataclass(frozen=True)
class _Golden:
    """A golden store: its run, its entries, and the state after each of them."""

    spec_data: bytes
    spec: RunSpec
    entries: tuple[bytes, ...]
    trees: tuple[Any, ...]
    states: tuple[bytes, ...]
    heads: tuple[str, ...]


@cache
def _golden() -> tuple[_Golden, ...]:
    found = []
    for folder in sorted(_GOLDEN.glob("store/runs/golden/*")):
        if not (folder / "run.json").exists():
            continue
        data = (folder / "run.json").read_bytes()
        spec = RunSpec.from_bytes(data)
        entries = tuple(path.read_bytes() for path in sorted((folder / "log").iterdir()))
        state, states, heads = RunState(spec, forgets=True), [], []
        for entry in entries:
            states.append(state_to_bytes(state))
            heads.append(state.head_digest)
            apply_entry(state, Entry.from_bytes(entry), entry)
        found.append(_Golden(data, spec, entries, tuple(map(json.loads, entries)), tuple(states), tuple(heads)))
    return tuple(found)


def _make_entry(source: Random) -> bytes:
    golden = pick(source, _golden())
    return mutated_json(source, pick(source, golden.trees), golden.trees)


def _make_run_json(source: Random) -> bytes:
    return mutated_json(source, pick(source, _specs()), _specs())


@cache
def _specs() -> tuple[Any, ...]:
    return tuple(json.loads(golden.spec_data) for golden in _golden())


def _make_state(source: Random) -> bytes:
    return mutated_json(source, pick(source, _states()), _states())


@cache
def _states() -> tuple[Any, ...]:
    return tuple(map(json.loads, _golden()[-1].states))


def _decode_state(data: bytes) -> object:
    return state_from_bytes(data, _golden()[-1].spec)


def _make_step(source: Random) -> bytes:
    """Returns an entry that follows its predecessor, most of whose items are nearly those that came then."""
    golden = _golden()[-1]
    at = int(source.random() * len(golden.entries))
    items = list(golden.trees[at]["items"])
    while source.random() < 0.3:
        items.insert(0, pick(source, pick(source, golden.trees)["items"]))
    pool = [one["items"] for one in golden.trees]
    changed = msgspec.Raw(mutated_json(source, items, pool))
    following = {"position": at + 1, "previous": golden.heads[at], "run_uid": golden.spec.uid, "format": 1}
    return msgspec.json.encode(golden.trees[at] | following | {"items": changed})


def _apply_step(data: bytes) -> object:
    """Applies an entry to the state that it follows, and asks the state what every replica asks of it."""
    golden = _golden()[-1]
    entry = Entry.from_bytes(data)
    if not 1 <= entry.position <= len(golden.states):
        raise LogCorruptError("no such position")
    state = state_from_bytes(golden.states[entry.position - 1], golden.spec)
    apply_entry(state, entry, data)
    kept_names(state, Retention.of(state.policy))
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
    return state_from_bytes(_golden()[-1].states[-1], _golden()[-1].spec)


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


# Policies, names and settings.


_POLICIES: Final = (
    Policy(),
    Policy(quorum_count=2, merge_by_fragment={}, pinned_positions=(3, 9), planned_step_count=10**6),
    Policy(delta_encoding=Encoding(Codec.INT8, block=64), delay_step_count=3, kept_hours=0.5, enrols_by_run=True),
)


def _make_policy_json(source: Random) -> bytes:
    return mutated_json(source, pick(source, _policy_trees()), _policy_trees())


@cache
def _policy_trees() -> tuple[Any, ...]:
    return tuple(json.loads(msgspec.json.encode(policy.to_json())) for policy in _POLICIES)


def _decode_policy_json(data: bytes) -> object:
    return Policy.from_json(json.loads(data))


def _make_policy_text(source: Random) -> bytes:
    lines = pick(source, _policy_lines())
    lines = [pick(source, lines) for _ in range(1 + int(source.random() * 3))]
    return mutated_bytes(source, "\n".join(lines).encode())


@cache
def _policy_lines() -> tuple[list[str], ...]:
    return tuple([f"{name}={value}" for name, value in policy_text.rows(policy)] for policy in _POLICIES)


def _decode_policy_text(data: bytes) -> object:
    return policy_text.apply(data.decode(errors="replace").split("\n"), Policy())


_TOML: Final = (
    b'target = "syncer.example:443"\ntls-ca = "/etc/skerry/ca.pem"\n[runs.list]\njson = true\n[serve]\nworkers = 4\n',
    b'[serve]\nlisten = "0.0.0.0:50051"\nstore = "s3://bucket/x"\ndrain-grace = 1e3\nsizes = [1]\n',
    b"a.b.c = 1\nd = 1979-05-27T07:32:00Z\ne = '''x'''\nf = { g = [ { h = 0x1f } ] }\n[[i]]\nj = nan\n",
)


def _make_toml(source: Random) -> bytes:
    _commands()  # so that no input takes the time to load them
    return mutated_bytes(source, pick(source, _TOML), _TOML)


def _decode_toml(data: bytes) -> object:
    found = settings.read_file(_file_of(data))
    return settings.defaults(found, _commands(), click.Context(cli), "runs")


@cache
def _commands() -> click.Group:
    """Returns the command line's group with every command loaded, which takes a second."""
    context = click.Context(cli)
    found = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    return click.Group("skerry", {name: command for name, command in found.items() if command is not None})


@cache
def _memory_file() -> int:
    return os.memfd_create("fuzz")


def _file_of(data: bytes) -> Path:
    """Returns a file that holds `data` until the next call."""
    file = _memory_file()
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)
    return Path(f"/proc/self/fd/{file}")


_URIS: Final = (
    b"skerry://learner/us-east",
    b"skerry://learner/run/us",
    b"skerry://learner/run/us",
    b"skerry://admin/anna",
    b"skerry://reader/x",
)


def _make_uri(source: Random) -> bytes:
    return mutated_bytes(source, pick(source, _URIS), _URIS)


def _decode_uri(data: bytes) -> object:
    return Identity.parse(data.decode(errors="replace"))


# Messages.


def _make_message(messages: Callable[[], Sequence[Message]], source: Random) -> bytes:
    """Returns a changed message after the number of its kind."""
    known = messages()
    number = int(source.random() * len(known))
    others = [one for one in known if type(one) is type(known[number])]
    data = mutated_message(source, known[number], others).SerializeToString()
    return bytes([number]) + (mutated_bytes(source, data) if source.random() < 0.05 else data)


def _message(messages: Callable[[], Sequence[Message]], data: bytes) -> Message:
    return type(messages()[data[0] % len(messages())]).FromString(data[1:])


@cache
def _policy_messages() -> tuple[types.Policy, ...]:
    return tuple(map(policy_to_message, _POLICIES))


def _decode_policy_message(data: bytes) -> object:
    message: Any = _message(_policy_messages, data)
    return policy_to_message(policy_from_message(message, _POLICIES[1]))


@cache
def _run_messages() -> tuple[types.Run, ...]:
    layouts = (_LAYOUT, FragmentLayout("head", (TensorSpec("h", (4, 5)),)))
    tensors, fragments = layouts_to_messages(layouts, {})
    message = types.Run(
        name="demo",
        uid="0" * 32,
        tensors=tensors,
        fragments=fragments,
        position=7,
        policy=_policy_messages()[0],
        status=types.RUN_STATUS_OPEN,
        versions=[types.FragmentVersion(fragment="body", version=3, digest=bytes(32))],
    )
    message.created_at.FromSeconds(1_700_000_000)
    return (message,)


def _decode_layouts(data: bytes) -> object:
    message: Any = _message(_run_messages, data)
    layouts, dtypes = layouts_from_messages(message.tensors, message.fragments)
    return [(layout.bounds, layout.numel) for layout in layouts if layout.numel < 2**40], dtypes


@cache
def _reports() -> tuple[types.LearnerReport, ...]:
    report = types.LearnerReport(step_count=3, token_count=9, loss=1.5, sent_bytes=1, received_bytes=2)
    report.step_time.FromMilliseconds(20)
    report.stall_time.FromMilliseconds(2)
    report.adopted.add(fragment="body", version=2)
    return (report,)


def _decode_report(data: bytes) -> LearnerReport:
    message: Any = _message(_reports, data)
    return report_from_message(message, {"body", "head"})


@cache
def _statuses() -> tuple[Message, ...]:
    from google.protobuf.duration_pb2 import Duration
    from google.rpc import error_details_pb2, status_pb2

    status = status_pb2.Status(code=9, message="no")
    info = error_details_pb2.ErrorInfo(reason="BASE_STALE", domain="skerry", metadata={"run_uid": "0" * 32})
    for detail in (info, error_details_pb2.RetryInfo(retry_delay=Duration(seconds=3))):
        status.details.add().Pack(detail)
    return (status,)


def _decode_status(data: bytes) -> object:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", data[1:]))
    return error_from_rpc(grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), trailing, "no", ""))


@cache
def _plans() -> tuple[tuple[exchange.PullPlan, ...], tuple[bytes, ...], Any]:
    course = Course()
    values = np.random.default_rng(2).standard_normal(COURSE_LAYOUT.numel).astype(np.float32)
    names = {spec.name: ("float32", spec.shape) for spec in COURSE_LAYOUT.tensors}
    snapshot = header_bytes(names, {}) + b"".join(tensor_bytes(values))
    described = exchange.PlanObject(
        name="s",
        kind=exchange.OBJECT_KIND_SNAPSHOT,
        version=3,
        numel=COURSE_LAYOUT.numel,
        size_bytes=len(snapshot),
        digest=blake3(snapshot).digest(),
    )
    updates = course.applier(4, course.weights).plan
    full = exchange.PullPlan(from_version=-1, target=updates.target, objects=[described, *updates.objects])
    return (updates, full), (*course.data, snapshot), course.start


def _make_pull(source: Random) -> bytes:
    """Returns a plan and the bytes of its objects, each with its length before it."""
    plans, objects, _ = _plans()
    plan = pick(source, plans)
    data = list(objects[:4] if plan is plans[0] else (objects[4], *objects[:4]))
    if source.random() < 0.6:
        at = int(source.random() * len(data))
        is_file = len(data) == 5 and at == 0
        data[at] = mutated_bytes(source, data[at]) if is_file else mutated_frames(source, [data[at]])
    if source.random() < 0.6:
        plan = mutated_message(source, plan)
    told = plan.SerializeToString()
    told = mutated_bytes(source, told) if source.random() < 0.05 else told
    return b"".join(len(one).to_bytes(4, "little") + one for one in (told, *data))


def _decode_pull(data: bytes) -> object:
    pieces, rest = [], data
    while rest:
        size = 4 + int.from_bytes(rest[:4], "little")
        pieces.append(rest[4:size])
        rest = rest[size:]
    applier = PlanApplier(COURSE_LAYOUT, exchange.PullPlan.FromString(pieces[0]), _plans()[2])
    for index, piece in enumerate(pieces[1:]):
        for at in range(0, len(piece), 300):
            applier.feed(index, at, piece[at : at + 300])
    return applier.finish().tobytes()


def _of_json(value: Any, source: Random) -> bytes:
    return mutated_json(source, value)


def _decoders() -> Iterable[Decoder]:
    corrupt = (LogCorruptError, NewerFormatError)
    yield Decoder("frames", _make_frames, _decode_frames, (WireError,))
    yield Decoder("part", _make_frames, _decode_part, (SyncerError,))
    yield Decoder("part-header", partial(_of_json, _PART_HEADER), _decode_part_header, ())
    yield Decoder("safetensors", _make_tensor_file, _decode_tensor_file, (WireError,))
    yield Decoder("pull", _make_pull, _decode_pull, (CorruptDownloadError, DecodeError))
    yield Decoder("run.json", _make_run_json, partial(store._parse_spec, "run.json"), corrupt)
    yield Decoder("entry", _make_entry, Entry.from_bytes, (ValueError, NewerFormatError))
    yield Decoder("fold", _make_step, _apply_step, (*corrupt, ValueError))
    yield Decoder("checkpoint", _make_state, _decode_state, (ValueError, NewerFormatError))
    yield Decoder(
        "name", partial(_of_json, {"format": 1, "uid": "0" * 32}), partial(store._parse_name, "demo"), corrupt
    )
    yield Decoder("advice", partial(_of_json, _ADVICE), _decode_advice, (ValueError,))
    yield Decoder("identity", _make_uri, _decode_uri, (ValueError,))
    yield Decoder("policy-json", _make_policy_json, _decode_policy_json, (ValueError, RecursionError))
    yield Decoder("policy-text", _make_policy_text, _decode_policy_text, (ValueError,))
    yield Decoder("settings", _make_toml, _decode_toml, (click.UsageError,))
    yield Decoder(
        "policy-message", partial(_make_message, _policy_messages), _decode_policy_message, (ValueError, DecodeError)
    )
    yield Decoder("layouts", partial(_make_message, _run_messages), _decode_layouts, (ValueError, DecodeError))
    yield Decoder("report", partial(_make_message, _reports), _decode_report, (SyncerError, DecodeError))
    yield Decoder("status", partial(_make_message, _statuses), _decode_status, ())


DECODERS: Final = {decoder.name: decoder for decoder in _decoders()}
