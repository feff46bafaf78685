"""Writes the recorded session in `tests/unit/wire/vectors/session`, with which a client is tested without a server.

    python -m tests.unit.wire.make_session            write the files
    python -m tests.unit.wire.make_session --check    exit with 1 where a file differs from what would be written

One learner, one fragment: it pulls a snapshot and updates, pushes four deltas that meet each fate that a learner acts
on, and adopts what comes. The updates are made here, of no merge rule, so that the session outlives changes of those.
protos/FORMAT.md, section 11, specifies the files; docs/client-guide.md the arithmetic.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from google.protobuf import json_format
from google.protobuf.message import Message

from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import types_pb2 as types
from skerry.wire.digests import delta_digest, tree_digest
from tests.unit.wire.make_vectors import patterns, tensors_json
from tests.unit.wire.session_objects import (
    LAYOUT,
    RANGES,
    Float32s,
    Json,
    frames_of,
    identifier,
    safetensors_of,
    values,
)

DIRECTORY = Path(__file__).parent / "vectors" / "session"
WIRE_ENCODING = types.Encoding(
    codec=types.CODEC_INT4, block=16, vector_codec=types.CODEC_FLOAT32, compressor=types.COMPRESSOR_ZSTD
)

ANOTHERS = types.DeltaFate(
    delta_id=identifier("another's delta"),
    fragment=LAYOUT.name,
    learner_id="eu-west",
    fate=types.FATE_MERGED,
    version=3,
    weight_share=1.0,
)


def message_json(message: Message) -> Json:
    """Returns a message as proto3 JSON, with the field names of the .proto."""
    fields: Json = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return fields


class Session:
    """The history, written down while it is made up."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.steps: list[Json] = []
        self._versions: dict[int, Float32s] = {1: values("initial", 1.0)}
        self._position = 7
        self._trained = 0
        self._sent_until = 0
        self._sent_before = 0
        self._theta = np.empty(0, np.float32)
        self._base = np.empty(0, np.float32)
        self._base_version = -1
        self._objects: dict[int, list[exchange.PlanObject]] = {1: self._snapshot(1)}
        self._delta = ""
        self._decoded: Float32s | None = None  # q

    # What the syncer does.

    def _object(
        self, name: str, kind: exchange.ObjectKind.ValueType, version: int, place: tuple[int, int], data: bytes
    ) -> exchange.PlanObject:
        self.files[name] = data
        return exchange.PlanObject(
            name=name,
            kind=kind,
            version=version,
            first=place[0],
            numel=place[1],
            size_bytes=len(data),
            digest=blake3(data).digest(),
        )

    def _snapshot(self, version: int) -> list[exchange.PlanObject]:
        return [
            self._object(
                f"snapshot-{version}-{first}.safetensors",
                exchange.OBJECT_KIND_SNAPSHOT,
                version,
                (first, numel),
                safetensors_of(self._versions[version], first, numel),
            )
            for first, numel in RANGES
        ]

    def update(self, version: int, ranges: tuple[tuple[int, int], ...], *, vectors_only: bool = False) -> None:
        """Makes a version of the one before it."""
        wanted = values(f"update {version}", 0.125)
        if vectors_only:
            for index, start, stop in LAYOUT.ranges(0, LAYOUT.numel):
                wanted[start:stop] *= LAYOUT.tensors[index].is_vector
        weights = self._versions[version - 1].copy()
        self._objects[version] = []
        for first, numel in ranges:
            data, decoded, _ = frames_of(wanted[first : first + numel], first)
            weights[first : first + numel] -= decoded
            name = f"update-{version}-{first}.frames"
            self._objects[version].append(
                self._object(name, exchange.OBJECT_KIND_UPDATE, version, (first, numel), data)
            )
        self._versions[version] = weights
        self._position += 1

    def roll_back(self, version: int, source: int) -> None:
        """Gives the fragment its next version with an older content."""
        self._versions[version] = self._versions[source]
        self._objects[version] = self._snapshot(version)
        self._position += 1
        rolled_back = types.RolledBack(versions=[self.version(version)], source_versions=[source], run_step_count=10)
        self.event(rolled_back=rolled_back)

    def version(self, number: int) -> types.FragmentVersion:
        return types.FragmentVersion(fragment=LAYOUT.name, version=number, digest=tree_digest(self._versions[number]))

    def fate(self, fate: types.Fate.ValueType, **fields: Any) -> types.DeltaFate:
        return types.DeltaFate(delta_id=self._delta, fragment=LAYOUT.name, learner_id="us-east", fate=fate, **fields)

    def run(self) -> types.Run:
        return types.Run(
            name="recorded",
            uid=identifier("run"),
            tensors=[types.Tensor(name=one.name, shape=one.shape, dtype="float32") for one in LAYOUT.tensors],
            fragments=[types.Fragment(name=LAYOUT.name, tensors=[one.name for one in LAYOUT.tensors])],
            policy=types.Policy(inner_step_count=4, delta_encoding=WIRE_ENCODING, update_encoding=WIRE_ENCODING),
            status=types.RUN_STATUS_OPEN,
            versions=[self.version(max(self._versions))],
            position=self._position,
        )

    # What is written down.

    def step(self, kind: str, **fields: Any) -> None:
        self.steps.append({"step": kind} | fields)

    def event(self, **kind: Any) -> None:
        self.step("event", event=message_json(types.Event(position=self._position, **kind)))

    def committed(self, version: int, *merged: types.DeltaFate) -> None:
        self.event(
            version_committed=types.VersionCommitted(version=self.version(version), merged=merged, participation=1)
        )

    def decided(self, fate: types.DeltaFate) -> None:
        self.event(fates_decided=types.FatesDecided(fates=[fate]))

    def attach(self) -> None:
        hello = exchange.Hello(
            run="recorded",
            learner_id="us-east",
            region="us",
            session_id=identifier("session"),
            tensors=self.run().tensors,
        )
        attached = exchange.Attached(run=self.run(), run_step_count=8)
        attached.lease_term.FromSeconds(15)
        self.step(
            "attach",
            request=message_json(exchange.AttachRequest(hello=hello)),
            response=message_json(exchange.AttachResponse(attached=attached)),
        )

    def leave(self) -> None:
        self.step("leave", request=message_json(exchange.AttachRequest(leave=exchange.Leave())))

    def pull(self, versions: tuple[int, ...]) -> None:
        """Pulls the newest version by the objects of these versions."""
        target = max(self._versions)
        request = exchange.PullFragmentRequest(
            run="recorded",
            run_uid=identifier("run"),
            seen_position=self._position,
            fragment=LAYOUT.name,
            from_version=self._base_version,
            is_newest=True,
        )
        objects = [one for version in versions for one in self._objects[version]]
        starts_with_snapshot = bool(objects) and objects[0].kind == exchange.OBJECT_KIND_SNAPSHOT
        plan = exchange.PullPlan(
            from_version=-1 if starts_with_snapshot else self._base_version,
            target=self.version(target),
            objects=objects,
            position=self._position,
        )
        self.step(
            "pull",
            request=message_json(request),
            plan=message_json(plan),
            weights=patterns(self._versions[target]),
        )

    def train(self, steps: int) -> None:
        """Takes inner steps, which move the weights a little."""
        self._trained += steps
        moved = np.float32(0.015625) * values(f"training {self._trained}", float(steps))
        self._theta = self._theta + moved
        self.step("train", step_count=self._trained, token_count=100 * self._trained, theta=patterns(self._theta))

    def push(self, *, is_cut_off: bool = False) -> None:
        """Sends what is unsent, in two parts; a push that is cut off has to send the second part again."""
        unsent = self._base - self._theta
        assert self._decoded is None
        decoded = np.empty_like(unsent)
        parts: list[Json] = []
        refs: list[tuple[int, int, bytes]] = []
        for first, numel in RANGES:
            frames, decoded[first : first + numel], digest = frames_of(unsent[first : first + numel], first)
            parts.append({"first": first, "numel": numel, "frames": frames.hex(), "part_digest": digest.hex()})
            refs.append((first, numel, digest))
        self._delta = identifier(f"delta at {self._trained}")
        header = exchange.PushHeader(
            run="recorded",
            run_uid=identifier("run"),
            seen_position=self._position,
            learner_id="us-east",
            session_id=identifier("session"),
            delta_id=self._delta,
            fragment=LAYOUT.name,
            base_version=self._base_version,
            base_digest=tree_digest(self._versions[self._base_version]),
            step_count=self._trained - self._sent_until,
            token_count=100 * (self._trained - self._sent_until),
            last_step=self._trained,
        )
        stored = [exchange.StoredPart(first=f, numel=n, digest=d) for f, n, d in refs[:1]]
        query = exchange.QueryPushResponse(
            state=exchange.PUSH_STATE_PARTS_STORED, parts=stored, position=self._position
        )
        self._position += 1
        answer = exchange.PushDeltaResponse(
            state=exchange.PUSH_STATE_ACCEPTED, fate=self.fate(types.FATE_PENDING), position=self._position
        )
        self.step(
            "push",
            header=message_json(header),
            unsent=patterns(unsent),
            parts=parts,
            delta_digest=delta_digest(refs).hex(),
            decoded=patterns(decoded),
            **({"query_after_cut": message_json(query)} if is_cut_off else {}),
            answer=message_json(answer),
        )
        self._decoded, self._sent_before, self._sent_until = decoded, self._sent_until, self._trained

    def adopt(self, how: str) -> None:
        """Brings the model to the newest version: `load`, `rebase`, `rebase merged` or `replace`."""
        self._base_version = max(self._versions)
        newest = self._versions[self._base_version]
        if how in {"load", "replace"}:
            self._theta, self._decoded, self._sent_until = newest, None, self._trained
        else:
            shift = newest - self._base
            if how == "rebase merged":
                assert self._decoded is not None
                shift = shift + self._decoded
                self._decoded = None
            self._theta = self._theta + shift
        self._base = newest
        self.step("adopt", how=how, version=self._base_version, theta=patterns(self._theta))

    def returned(self) -> None:
        """Takes note that the delta in flight was given up: its work is unsent again."""
        self._decoded, self._sent_until = None, self._sent_before


def recorded() -> Session:
    """Returns the whole history."""
    session = Session()
    session.update(2, ((0, 80),))
    session.attach()
    session.pull((1, 2))
    session.adopt("load")
    session.train(4)
    session.push()
    # Another learner's delta is merged first; ours is in flight.
    session.train(1)
    session.update(3, ((0, 80),))
    session.committed(3, ANOTHERS)
    session.pull((3,))
    session.adopt("rebase")
    # Ours is merged.
    session.train(1)
    session.update(4, RANGES)
    session.committed(4, session.fate(types.FATE_MERGED, version=4, staleness=1, weight_share=1.0))
    session.pull((4,))
    session.adopt("rebase merged")
    # The second push is cut off after its first part. The run is rolled back, and the delta expires.
    session.train(2)
    session.push(is_cut_off=True)
    session.roll_back(5, 3)
    session.decided(session.fate(types.FATE_EXPIRED, reason="the run was rolled back"))
    session.returned()
    session.pull((5,))
    session.adopt("rebase")
    # The third holds that work too, and is quarantined: the fragment is replaced.
    session.train(1)
    session.push()
    session.update(6, ((0, 80),))
    session.decided(session.fate(types.FATE_QUARANTINED, reason="norm is an outlier. ratio=31.0"))
    session.committed(6)
    session.pull((6,))
    session.adopt("replace")
    # The fourth holds the steps since then alone.
    session.train(4)
    session.push()
    session.update(7, ((0, 80),), vectors_only=True)
    session.committed(7, session.fate(types.FATE_MERGED, version=7, weight_share=0.5))
    session.pull((7,))
    session.adopt("rebase merged")
    session.leave()
    return session


def all_files() -> dict[Path, bytes]:
    """Returns the content of each file."""
    session = recorded()
    text = json.dumps({"tensors": tensors_json(LAYOUT), "steps": session.steps}, indent=1, ensure_ascii=False) + "\n"
    return {DIRECTORY / name: data for name, data in {**session.files, "session.json": text.encode()}.items()}


def differences() -> list[str]:
    """Returns the paths of files that are not what this script would write, or that it would not write."""
    expected = all_files()
    actual = {path: path.read_bytes() for path in DIRECTORY.glob("*")}
    return sorted(str(path) for path in expected.keys() | actual.keys() if expected.get(path) != actual.get(path))


def main() -> int:
    """Write or check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file differs")
    if parser.parse_args().check:
        wrong = differences()
        for name in wrong:
            print(f"{name} is not what {Path(__file__).name} writes")
        return 1 if wrong else 0
    for path, data in all_files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
