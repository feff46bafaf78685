"""A run whose log and objects are real and in memory, driven without a syncer: deltas in, versions out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from skerry.algorithm.step import OuterState
from skerry.runtime.clock import Clock, SystemClock
from skerry.runtime.workers import InlineWorkers, Workers
from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.digests import delta_digest, tree_digest
from skerry.wire.frames import encode_frames, parse_frames, raw_bytes
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy
from skerry.wire.quantise import per_tensor_squared_norms
from skerry_syncer.merge.merger import MergeResult, merge_round
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    CollectedItem,
    CommittedItem,
    Item,
    Member,
    ObjectRef,
    PolicyItem,
    RollbackFragment,
    RollbackItem,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.log.run_log import RunLog
from skerry_syncer.store.maintenance.checking import VerifyReport, verify_run
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.versions.blobs import SnapshotKind
from skerry_syncer.store.versions.replay import Replayer
from skerry_syncer.store.versions.run import Run
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.dict_objects import DictObjects
from tests.support.seeded_entropy import SeededEntropy

Float32s = NDArray[np.float32]
FLOAT32 = Encoding(Codec.FLOAT32, compressor=Compressor.NONE)
INT4 = Encoding(Codec.INT4, block=4)
FRAGMENT = "body"


def layout_of(*shapes: tuple[int, ...]) -> FragmentLayout:
    """Returns a fragment with tensors of these shapes."""
    return FragmentLayout(FRAGMENT, tuple(TensorSpec(f"t{index}", shape) for index, shape in enumerate(shapes)))


@dataclass
class Driver:
    """One run with one fragment, and the outer state of its newest version."""

    run: Run
    layout: FragmentLayout
    objects: Objects
    workers: Workers
    scratch: Scratch
    state: OuterState
    delta_count: int = 0

    @classmethod
    async def start(
        cls,
        layout: FragmentLayout,
        policy: Policy,
        *,
        weights: Float32s | None = None,
        objects: Objects | None = None,
        workers: Workers | None = None,
        clock: Clock | None = None,
        spec: RunSpec | None = None,
    ) -> Driver:
        """Creates the run, opens it with version 0, and attaches learners `m0` to `m9`."""
        objects = objects or DictObjects()
        workers = workers or InlineWorkers()
        dtypes = {tensor.name: "float32" for tensor in layout.tensors}
        spec = spec or RunSpec("run", "0" * 32, (layout,), dtypes, 0.0)
        entropy = SeededEntropy(random.Random(0))
        await objects.create(f"runs/{spec.name}/{spec.uid}/run.json", spec.to_bytes())
        run = Run(RunLog(objects, spec, clock=clock or SystemClock(), entropy=entropy, writer="test"), workers)
        zeros = np.zeros(layout.numel, np.float32) if weights is None else weights
        ref = await run.blobs.write_snapshot(layout, 0, "weights", zeros)
        self = cls(run, layout, objects, workers, Scratch(None), OuterState(zeros, zeros, zeros, 0))
        await self.append(PolicyItem("c" * 32, policy))
        await self.append(SnapshotItem(FRAGMENT, 0, tree_digest(zeros).hex(), (ref,), ()))
        await self.append(StatusItem(RunStatus.OPEN))
        await self.append(*(SessionItem(f"m{index}", f"{index:032x}", "here") for index in range(10)))
        self.state = await self.replayer().rebuild(0, self.scratch)
        return self

    @property
    def log(self) -> RunLog:
        """The run's log."""
        return self.run.log

    def replayer(self) -> Replayer:
        """Returns what makes any version again."""
        return Replayer(self.run, FRAGMENT)

    async def verify(self) -> VerifyReport:
        """Checks the whole run."""
        return await verify_run(self.run, scratch=Scratch(None))

    async def append(self, *items: Item) -> None:
        """Appends items that must all be admitted."""
        for outcome in await self.log.append(items):
            assert outcome.rejection is None, outcome

    async def push(
        self,
        learner: int,
        values: Sequence[float] | NDArray[np.floating[Any]],
        *,
        encoding: Encoding = FLOAT32,
        cuts: Sequence[int] = (),
        steps: int = 24,
        tokens: int = 1000,
        is_kept: bool = False,
    ) -> AcceptedItem:
        """Stores a delta in parts that are cut at `cuts`, kept in memory if so asked for, and has it accepted."""
        array = np.asarray(values, np.float32)
        delta = f"{self.delta_count:032x}"
        self.delta_count += 1
        edges = [0, *cuts, self.layout.numel]
        refs: list[ObjectRef] = []
        norms = np.zeros(len(self.layout.tensors))
        for first, stop in pairwise(edges):
            piece = array[first:stop].copy()
            hasher = blake3()
            frames = list(encode_frames(piece, self.layout, encoding, first=first, decoded=piece, digest=hasher))
            part_norms = per_tensor_squared_norms(piece, self.layout, first)
            norms += part_norms
            digest = hasher.digest().hex()
            kept = [frame for data in frames for frame in parse_frames(data)] if is_kept else []
            kept = [frame._replace(compressor=Compressor.NONE, payload=raw_bytes(frame)) for frame in kept]
            stored = await self.run.blobs.write_part(
                FRAGMENT, delta, first, stop - first, digest, part_norms.tolist(), frames, kept
            )
            refs.append(stored.ref)
        item = AcceptedItem(
            delta=delta,
            fragment=FRAGMENT,
            learner=f"m{learner}",
            session=f"{learner:032x}",
            base_version=self.state.version,
            base_digest=self.log.state.fragments[FRAGMENT].newest.digest,
            digest=delta_digest([(ref.first, ref.numel, bytes.fromhex(ref.digest)) for ref in refs]).hex(),
            parts=tuple(refs),
            step_count=steps,
            token_count=tokens,
            last_step=steps,
            squared_norms=tuple(norms.tolist()),
        )
        await self.append(item)
        return item

    async def close(
        self,
        deltas: Sequence[AcceptedItem],
        *,
        weights: Sequence[float] | None = None,
        participation: float = 1.0,
        length: float = 24.0,
    ) -> ClosedItem:
        """Freezes a round of these deltas."""
        weights = weights or [1.0] * len(deltas)
        members = tuple(Member(delta.delta, weight, 0) for delta, weight in zip(deltas, weights, strict=True))
        closing = ClosedItem(FRAGMENT, self.state.version + 1, 0, members, participation, (), length)
        await self.append(closing)
        return closing

    async def merge(self, closing: ClosedItem) -> MergeResult:
        """Takes the state to the version of a frozen round, without committing it."""
        acc = np.full(len(self.state.weights), np.nan, np.float32)  # whatever a merge before has left there
        return await merge_round(self.run, closing, self.state, acc)

    async def round(self, deltas: Sequence[AcceptedItem], **close: Any) -> CommittedItem:
        """Closes, as `close` does, merges and commits a round of these deltas."""
        return await self.commit(await self.merge(await self.close(deltas, **close)))

    async def commit(self, result: MergeResult) -> CommittedItem:
        """Makes a merge durable."""
        item = await result.stored()
        await self.append(item)
        return item

    def part_names(self, version: int) -> list[str]:
        """Returns the parts of the deltas that a version was merged from."""
        record = self.log.state.fragments[FRAGMENT].versions[version].commit
        assert record is not None
        deltas = [self.log.state.deltas[member.delta].item for member in record.close.members]
        return [part.name for delta in deltas for part in delta.parts]

    async def damage(self, name: str) -> None:
        """Flips the last bit of a stored object."""
        path = f"{self.log.prefix}/{name}"
        data = bytearray(await self.objects.get(path))
        data[-1] ^= 1
        await self.objects.delete([path])
        await self.objects.write(path, bytes(data))

    async def collect(self, *names: str) -> None:
        """Condemns and deletes objects, as a collection does."""
        await self.append(CollectedItem(names))
        await self.objects.delete([f"{self.log.prefix}/{name}" for name in names])

    async def write_snapshot(self, version: int) -> tuple[ObjectRef, ...]:
        """Stores the outer state as objects of that version: weights, momentum, residual."""
        kinds: tuple[SnapshotKind, ...] = ("weights", "momentum", "residual")
        vectors = (self.state.weights, self.state.momentum, self.state.residual)
        return tuple(
            [
                await self.run.blobs.write_snapshot(self.layout, version, kind, values)
                for kind, values in zip(kinds, vectors, strict=True)
            ]
        )

    async def roll_back(self, source: int) -> None:
        """Gives the run its next version, with the content of version `source`, and the state that goes with it."""
        fragment = self.log.state.fragments[FRAGMENT]
        self.state = await self.replayer().rebuild(source, self.scratch)
        self.state.version = fragment.version + 1
        refs = await self.write_snapshot(self.state.version)
        digest = fragment.versions[source].digest
        target = RollbackFragment(FRAGMENT, self.state.version, source, digest, refs[:1], refs[1:])
        await self.append(RollbackItem(self.log.entropy.hex_id(), 1, (target,)))

    async def snapshot(self) -> None:
        """Stores the newest version in full."""
        refs = await self.write_snapshot(self.state.version)
        digest = self.log.state.fragments[FRAGMENT].newest.digest
        await self.append(SnapshotItem(FRAGMENT, self.state.version, digest, refs[:1], refs[1:]))
