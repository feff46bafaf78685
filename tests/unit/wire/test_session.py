"""The recorded session, replayed by a client that knows FORMAT.md and the learner's guide and none of the product."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from google.protobuf import json_format
from numpy.typing import NDArray

from skerry.v1 import exchange_pb2, types_pb2
from tests.unit.wire import slow_codec

Json = dict[str, Any]
Float32s = NDArray[np.float32]
FOLDER = Path(__file__).parent / "vectors" / "session"
SESSION: Json = json.loads((FOLDER / "session.json").read_text("utf-8"))
MESSAGES: dict[tuple[str, str], type[Any]] = {
    ("attach", "request"): exchange_pb2.AttachRequest,
    ("attach", "response"): exchange_pb2.AttachResponse,
    ("pull", "request"): exchange_pb2.PullFragmentRequest,
    ("pull", "plan"): exchange_pb2.PullPlan,
    ("push", "header"): exchange_pb2.PushHeader,
    ("push", "query_after_cut"): exchange_pb2.QueryPushResponse,
    ("push", "answer"): exchange_pb2.PushDeltaResponse,
    ("event", "event"): types_pb2.Event,
    ("leave", "request"): exchange_pb2.AttachRequest,
}


def floats(patterns: str) -> Float32s:
    return np.array([int(pattern, 16) for pattern in patterns.split()], np.uint32).view(np.float32)


class Layout:
    def __init__(self, tensors: list[Json]) -> None:
        self.names = [tensor["name"] for tensor in tensors]
        self.shapes = [tensor["shape"] for tensor in tensors]
        counts = [prod(shape) for shape in self.shapes]
        self.starts = [0, *accumulate(counts)]
        self.numel = self.starts[-1]

    def within(self, first: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yields (tensor, first element, end) of what each tensor has in a range."""
        for index, (start, stop) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            low, high = max(start, first), min(stop, first + numel)
            if low < high:
                yield index, low, high

    def block_lengths(self, first: int, numel: int, block: int) -> list[int]:
        tensors = [(start, stop - start) for start, stop in zip(self.starts, self.starts[1:], strict=False)]
        return list(slow_codec.block_lengths(tensors, first, numel, block))


def tree_digest(values: Float32s) -> bytes:
    assert len(values) <= 2**20
    leaf = blake3(values.tobytes()).digest()
    return blake3(b"skerry.tree.v1\0" + struct.pack("<Q", len(values)) + leaf).digest()


def decoded(data: bytes, layout: Layout, first: int, numel: int) -> Float32s:
    """Returns what frames that cover a range stand for."""
    at, patterns = first, []
    for frame in slow_codec.frames(data):
        assert frame.first == at
        lengths = layout.block_lengths(frame.first, frame.numel, frame.block) if frame.block else []
        patterns += slow_codec.dequantise(frame, lengths)
        at += frame.numel
    assert at == first + numel
    return np.array(patterns, np.uint32).view(np.float32)


def apply_snapshot(data: bytes, layout: Layout, first: int, numel: int, weights: Float32s) -> None:
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + size])
    body = data[8 + size :]
    assert len(body) == 4 * numel
    held = list(layout.within(first, numel))
    names = {layout.names[index] for index, _, _ in held}
    for index, start, stop in held:
        key = layout.names[index]
        if key == "__metadata__":
            key += ".tensor"
            while key in names:
                key += ".tensor"
        entry = header[key]
        begin, end = entry["data_offsets"]
        assert (entry["dtype"], entry["shape"], end - begin) == ("F32", layout.shapes[index], 4 * (stop - start))
        weights[start:stop] = np.frombuffer(body[begin:end], "<f4")


def encoded(values: Float32s, layout: Layout, first: int, encoding: Json) -> tuple[bytes, bytes]:
    """Returns a range's frames, uncompressed, and their part digest. A frame ends where the codec changes."""
    assert (encoding["codec"], encoding["vector_codec"]) == ("CODEC_INT4", "CODEC_FLOAT32")
    runs: list[tuple[int, int, int]] = []  # codec, first, end
    for index, low, high in layout.within(first, len(values)):
        codec = 4 if len(layout.shapes[index]) >= 2 else 1
        if runs and runs[-1][0] == codec:
            runs[-1] = (codec, runs[-1][1], high)
        else:
            runs.append((codec, low, high))
    frames, raw = b"", b""
    for codec, low, high in runs:
        piece, block = values[low - first : high - first], encoding["block"] if codec == 4 else 0
        if codec == 4:
            exact = [slow_codec.from_bits(int(pattern)) for pattern in piece.view(np.uint32)]
            payload = slow_codec.quantise(exact, codec, layout.block_lengths(low, high - low, block))
        else:
            payload = piece.tobytes()
        header = struct.pack("<4sBBHQIII", b"SKF1", codec, 0, block, low, high - low, len(payload), len(payload))
        frames += header + struct.pack("<I", zlib.crc32(header + payload)) + payload
        raw += payload
    return frames, blake3(raw).digest()


class Stranger:
    """One fragment of one learner: theta = A - q - u."""

    def __init__(self) -> None:
        self.layout = Layout(SESSION["tensors"])
        self.encoding: Json = {}
        self.version, self.digest = -1, b""
        self.anchor = self.theta = self.pulled = np.zeros(self.layout.numel, np.float32)
        self.in_flight = ""  # id of the delta whose fate is not final
        self.q: Float32s | None = None
        self.merged_version = -1
        self.must_replace = False
        self.step_count = self.sent_until = self.sent_before = 0
        self.target: Json = {}

    def attach(self, step: Json) -> None:
        self.encoding = step["response"]["attached"]["run"]["policy"]["delta_encoding"]

    def pull(self, step: Json) -> None:
        plan = step["plan"]
        assert int(step["request"]["from_version"]) == self.version
        from_version = int(plan.get("from_version", 0))
        assert from_version in {-1, self.version}
        weights = self.anchor.copy() if from_version >= 0 else np.zeros(self.layout.numel, np.float32)
        for one in plan["objects"]:
            data = (FOLDER / one["name"]).read_bytes()
            first, numel = int(one.get("first", 0)), int(one["numel"])
            assert len(data) == int(one["size_bytes"])
            assert blake3(data).digest() == base64.b64decode(one["digest"])
            if one["kind"] == "OBJECT_KIND_SNAPSHOT":
                apply_snapshot(data, self.layout, first, numel, weights)
            else:
                weights[first : first + numel] -= decoded(data, self.layout, first, numel)
        assert tree_digest(weights) == base64.b64decode(plan["target"]["digest"])
        assert (weights.view(np.uint32) == floats(step["weights"]).view(np.uint32)).all()
        self.pulled, self.target = weights, plan["target"]

    def adopt(self, step: Json) -> None:
        version = int(self.target["version"])
        if self.version < 0 or self.must_replace:
            how = "replace" if self.must_replace else "load"
            self.theta, self.sent_until = self.pulled, self.step_count
            self.in_flight, self.q, self.must_replace = "", None, False
        else:
            shift = self.pulled - self.anchor
            how = "rebase"
            if self.q is not None and 0 <= self.merged_version <= version:
                how = "rebase merged"
                shift += self.q
                self.in_flight, self.q, self.merged_version = "", None, -1
            self.theta = self.theta + shift
        self.anchor, self.version, self.digest = self.pulled, version, base64.b64decode(self.target["digest"])
        assert (how, version) == (step["how"], step["version"])
        assert (self.theta.view(np.uint32) == floats(step["theta"]).view(np.uint32)).all()

    def train(self, step: Json) -> None:
        self.step_count, self.theta = step["step_count"], floats(step["theta"])

    def push(self, step: Json) -> None:
        header = step["header"]
        assert not self.in_flight
        unsent = self.anchor - self.theta
        assert (unsent == floats(step["unsent"])).all()
        assert int(header["base_version"]) == self.version
        assert base64.b64decode(header["base_digest"]) == self.digest
        assert int(header["last_step"]) == self.step_count
        assert int(header["step_count"]) == self.step_count - self.sent_until
        q = np.empty_like(unsent)
        whole = blake3(b"skerry.delta.v1\0")
        for part in step["parts"]:
            first, numel = part["first"], part["numel"]
            frames, digest = encoded(unsent[first : first + numel], self.layout, first, self.encoding)
            assert (frames.hex(), digest.hex()) == (part["frames"], part["part_digest"])
            q[first : first + numel] = decoded(frames, self.layout, first, numel)
            whole.update(struct.pack("<QQ", first, numel) + digest)
        assert whole.hexdigest() == step["delta_digest"]
        assert (q == floats(step["decoded"])).all()
        stored = step.get("query_after_cut", {}).get("parts", [])
        known = [(part["first"], part["numel"], part["part_digest"]) for part in step["parts"]]
        assert {
            (int(part.get("first", 0)), int(part["numel"]), base64.b64decode(part["digest"]).hex()) for part in stored
        } <= set(known)
        assert step["answer"]["state"] == "PUSH_STATE_ACCEPTED"
        self.in_flight, self.q = header["delta_id"], q
        self.sent_before, self.sent_until = self.sent_until, self.step_count

    def event(self, step: Json) -> None:
        event = step["event"]
        for fate in (
            *event.get("version_committed", {}).get("merged", ()),
            *event.get("fates_decided", {}).get("fates", ()),
        ):
            if fate["delta_id"] != self.in_flight:
                continue
            match fate["fate"]:
                case "FATE_MERGED":
                    self.merged_version = int(fate["version"])
                case "FATE_EXPIRED" | "FATE_SUPERSEDED":
                    self.in_flight, self.q, self.sent_until = "", None, self.sent_before
                case "FATE_QUARANTINED":
                    self.must_replace = True

    def leave(self, step: Json) -> None:
        assert step["request"] == {"leave": {}}


def test_a_stranger_replays_the_session_bit_for_bit() -> None:
    stranger = Stranger()
    for step in SESSION["steps"]:
        getattr(stranger, step["step"])(step)
    assert (stranger.version, stranger.in_flight) == (7, "")


@pytest.mark.parametrize("step", SESSION["steps"], ids=lambda step: step["step"])
def test_every_message_of_the_session_is_one_of_the_contract(step: Json) -> None:
    for (kind, field), message in MESSAGES.items():
        if step["step"] == kind and field in step:
            parsed = json_format.ParseDict(step[field], message())
            assert json_format.MessageToDict(parsed, preserving_proto_field_name=True) == step[field]
