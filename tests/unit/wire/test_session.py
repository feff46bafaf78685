"""The recorded session, replayed by a learner in its simplest form; other tests check frames, snapshots and digests."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from google.protobuf import json_format
from numpy.typing import NDArray

from skerry.v1 import exchange_pb2, types_pb2
from skerry.wire import Codec, Compressor, Encoding, FragmentLayout, TensorSpec
from skerry.wire.digests import delta_digest, tree_digest
from skerry.wire.frames import encode_frames
from skerry.wire.messages import encoding_from_message
from skerry.wire.safetensors import TensorFileReader
from tests.support.decoding import decode_frames

Json = dict[str, Any]
Float32s = NDArray[np.float32]
FOLDER = Path(__file__).parent / "vectors" / "session"
SESSION: Json = json.loads((FOLDER / "session.json").read_text("utf-8"))
ENCODING = Encoding(Codec.INT4, block=16, compressor=Compressor.NONE)
MESSAGES: dict[str, dict[str, type[Any]]] = {
    "attach": {"request": exchange_pb2.AttachRequest, "response": exchange_pb2.AttachResponse},
    "pull": {"request": exchange_pb2.PullFragmentRequest, "plan": exchange_pb2.PullPlan},
    "push": {
        "header": exchange_pb2.PushHeader,
        "query_after_cut": exchange_pb2.QueryPushResponse,
        "answer": exchange_pb2.PushDeltaResponse,
    },
    "event": {"event": types_pb2.Event},
    "leave": {"request": exchange_pb2.AttachRequest},
}


def floats(patterns: str) -> Float32s:
    return np.array([int(pattern, 16) for pattern in patterns.split()], np.uint32).view(np.float32)


class Stranger:
    """One fragment of one learner: theta = A - q - u."""

    def __init__(self) -> None:
        tensors = (TensorSpec(tensor["name"], tuple(tensor["shape"])) for tensor in SESSION["tensors"])
        self.layout = FragmentLayout("body", tuple(tensors))
        self.version, self.digest = -1, b""
        self.anchor = self.theta = self.pulled = np.zeros(self.layout.numel, np.float32)
        self.in_flight = ""  # id of the delta whose fate is not final
        self.q: Float32s | None = None
        self.merged_version = -1
        self.must_replace = False
        self.step_count = self.sent_until = self.sent_before = 0
        self.target: Json = {}

    def attach(self, step: Json) -> None:
        stated = step["response"]["attached"]["run"]["policy"]["delta_encoding"]
        encoding = encoding_from_message(json_format.ParseDict(stated, types_pb2.Encoding()))
        assert replace(encoding, compressor=Compressor.NONE) == ENCODING

    def pull(self, step: Json) -> None:
        plan = step["plan"]
        assert int(step["request"]["from_version"]) == self.version
        from_version = int(plan.get("from_version", 0))
        assert from_version in {-1, self.version}
        weights = self.anchor.copy() if from_version >= 0 else np.zeros(self.layout.numel, np.float32)
        for stored in plan["objects"]:
            data = (FOLDER / stored["name"]).read_bytes()
            first, numel = int(stored.get("first", 0)), int(stored["numel"])
            assert len(data) == int(stored["size_bytes"])
            assert blake3(data).digest() == base64.b64decode(stored["digest"])
            if stored["kind"] == "OBJECT_KIND_SNAPSHOT":
                reader = TensorFileReader(self.layout, weights, first=first, numel=numel)
                reader.feed(data)
                reader.finish()
            else:
                update = np.empty(numel, np.float32)
                decode_frames(data, self.layout, update, first=first)
                weights[first : first + numel] -= update
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
        parts = list[tuple[int, int, bytes]]()
        for part in step["parts"]:
            first, numel, digest = part["first"], part["numel"], blake3()
            inside = slice(first, first + numel)
            frames = encode_frames(unsent[inside], self.layout, ENCODING, first=first, decoded=q[inside], digest=digest)
            assert b"".join(frames).hex() == part["frames"]
            assert digest.hexdigest() == part["part_digest"]
            parts.append((first, numel, digest.digest()))
        assert delta_digest(parts).hex() == step["delta_digest"]
        assert (q == floats(step["decoded"])).all()
        for part in step.get("query_after_cut", {}).get("parts", []):
            assert (int(part.get("first", 0)), int(part["numel"]), base64.b64decode(part["digest"])) in parts
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


def test_a_stranger_replays_the_session_bit_for_bit_in_messages_of_the_contract() -> None:
    stranger = Stranger()
    for step in SESSION["steps"]:
        for field, message in MESSAGES.get(step["step"], {}).items():
            if field in step:
                parsed = json_format.ParseDict(step[field], message())
                assert json_format.MessageToDict(parsed, preserving_proto_field_name=True) == step[field]
        getattr(stranger, step["step"])(step)
    assert (stranger.version, stranger.in_flight) == (7, "")
