"""A run on disk whose first round is closed and waits for its merge: what the merge table works on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from skerry.runtime.clock import SystemClock
from skerry.runtime.workers import Workers
from skerry.wire.codecs import Codec, Encoding, cut_parts
from skerry.wire.digests import delta_digest
from skerry.wire.frames import encode_frames
from skerry.wire.layout import FragmentLayout, TensorSpec
from skerry.wire.policy import Policy
from skerry.wire.quantise import per_tensor_squared_norms
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    ClosedItem,
    Item,
    Member,
    ObjectRef,
    PolicyItem,
    RunSpec,
    RunStatus,
    SessionItem,
    SnapshotItem,
    StatusItem,
)
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.store import Store
from skerry_syncer.store.versions.replay import snapshot_tensors, weights_digest
from skerry_syncer.store.versions.run import Run
from tests.support.seeded_entropy import SeededEntropy

FRAGMENT: Final = "fragment"
UID: Final = "0" * 32
COLUMNS: Final = 4096
PART_SIZE_BYTES: Final = 4 * 2**20
SEED: Final = 20260
DELTA_ENCODING: Final = Encoding(Codec.INT4)


def layout_of(numel: int) -> FragmentLayout:
    """Returns a fragment of some sixteen matrices and as many vectors, of at most `numel` elements."""
    rows = max(numel // COLUMNS // 16, 1)
    tensors = []
    for index in range(16):
        tensors.append(TensorSpec(f"matrix.{index}", (rows - 1 or 1, COLUMNS)))
        tensors.append(TensorSpec(f"vector.{index}", (COLUMNS,)))
    return FragmentLayout(FRAGMENT, tuple(tensors))


def open_store(directory: Path, workers: Workers) -> Store:
    """Returns the store in a directory; its identifiers are seeded, so that runs of the benchmark are alike."""
    entropy = SeededEntropy(random.Random(SEED))
    objects = open_objects(directory.as_uri(), new=True)
    return Store(objects, clock=SystemClock(), entropy=entropy, workers=workers, writer="benchmark")


async def prepare(directory: Path, numel: int, learner_count: int, workers: Workers) -> None:
    """Writes the run: version 0, one int4 delta of each learner, and the close of their round."""
    layout = layout_of(numel)
    spec = RunSpec("merge", UID, (layout,), {tensor.name: "float32" for tensor in layout.tensors}, 0.0)
    store = open_store(directory, workers)
    run = await store.create_draft(spec)
    generator = np.random.default_rng(SEED)
    weights = generator.standard_normal(layout.numel, np.float32)
    ref = await run.blobs.write_snapshot(FRAGMENT, 0, "weights", snapshot_tensors(layout, weights))
    digest = await weights_digest(weights, workers=workers)
    learners = [f"learner-{index}" for index in range(learner_count)]
    items: list[Item] = [
        PolicyItem("create", Policy(delta_encoding=DELTA_ENCODING)),
        SnapshotItem(FRAGMENT, 0, digest, (ref,), ()),
        StatusItem(RunStatus.OPEN),
        *(SessionItem(learner, learner, "here") for learner in learners),
    ]
    members = []
    for learner in learners:
        generator.standard_normal(out=weights, dtype=np.float32)
        items.append(await _push(run, layout, learner, weights, digest))
        members.append(Member(learner, 1.0, 0))
    items.append(ClosedItem(FRAGMENT, 1, 0, tuple(members), 1.0, (), 24.0))
    for outcome in await run.log.append(items):
        assert outcome.rejection is None, outcome
    await store.close()


async def _push(
    run: Run, layout: FragmentLayout, learner: str, values: NDArray[np.float32], base_digest: str
) -> AcceptedItem:
    """Stores one delta, named like its learner; `values` are overwritten with what it decodes to."""
    refs: list[ObjectRef] = []
    norms = np.zeros(len(layout.tensors))
    for first, numel in cut_parts(layout, DELTA_ENCODING, PART_SIZE_BYTES):
        piece, hasher = values[first : first + numel], blake3()
        frames = list(encode_frames(piece, layout, DELTA_ENCODING, first=first, decoded=piece, digest=hasher))
        part_norms = per_tensor_squared_norms(piece, layout, first)
        norms += part_norms
        digest = hasher.digest().hex()
        stored = await run.blobs.write_part(FRAGMENT, learner, first, numel, digest, part_norms.tolist(), frames)
        refs.append(stored.ref)
    return AcceptedItem(
        delta=learner,
        fragment=FRAGMENT,
        learner=learner,
        session=learner,
        base_version=0,
        base_digest=base_digest,
        digest=delta_digest([(ref.first, ref.numel, bytes.fromhex(ref.digest)) for ref in refs]).hex(),
        parts=tuple(refs),
        step_count=24,
        token_count=24_000,
        last_step=24,
        squared_norms=tuple(norms.tolist()),
    )
