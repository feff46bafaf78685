"""Any version is rebuilt bit for bit: from its deltas, along the updates, across snapshots and roll-backs.

Objects that are lost or damaged are named, and gone around where there is a way.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.algorithm.step import TORN, OuterState
from skerry.runtime.workers import ThreadWorkers
from skerry.wire.codecs import Codec, Encoding
from skerry.wire.digests import tree_digest
from skerry.wire.frames import encode_frames
from skerry.wire.policy import MergeRule, OuterOptimizer, Policy
from skerry_syncer.merge.merger import Merger
from skerry_syncer.store.errors import ObjectMissingError, UnreadableObjectError
from skerry_syncer.store.log.entries import ObjectRef
from skerry_syncer.store.versions.replay import UnreadableDeltaError, float32s_from_hex
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.log_bench import store_on
from tests.support.merge_driver import FLOAT32, FRAGMENT, INT4, Driver, layout_of

NO_FILES = Scratch(None)
LAYOUT = layout_of((5, 7), (3,), (4, 4))


def assert_same_bits(one: OuterState, other: OuterState) -> None:
    assert one.version == other.version
    for name in ("weights", "momentum", "residual"):
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes(), name


async def trained(round_count: int, *, seed: int = 0, policy: Policy | None = None, snapshot_at: int = -1) -> Driver:
    """Returns a run after some rounds of one to three random deltas each."""
    rng = np.random.default_rng(seed)
    policy = policy or Policy(update_encoding=INT4)
    driver = await Driver.start(LAYOUT, policy, weights=rng.normal(size=LAYOUT.numel).astype(np.float32))
    for _ in range(round_count):
        count = rng.integers(1, 4)
        deltas = [await driver.push(learner, rng.normal(size=LAYOUT.numel), encoding=INT4) for learner in range(count)]
        await driver.round(deltas, weights=rng.uniform(0.1, 5, count).tolist(), participation=rng.uniform(0.2, 1))
        if driver.state.version == snapshot_at:
            await driver.snapshot()
    return driver


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    rule=st.sampled_from(MergeRule),
    codec=st.sampled_from(Codec),
    block=st.integers(1, 9),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
)
async def test_deltas_and_updates_both_lead_to_the_merged_state_bit_for_bit(
    seed: int, rule: MergeRule, codec: Codec, block: int, momentum: float
) -> None:
    policy = Policy(merge=rule, outer=OuterOptimizer(momentum=momentum), update_encoding=Encoding(codec, block=block))
    driver = await trained(4, seed=seed, policy=policy)
    assert_same_bits(await driver.replayer().rebuild(4, NO_FILES), driver.state)
    weights = await driver.replayer().weights_at(4)
    assert weights.tobytes() == driver.state.weights.tobytes()
    assert tree_digest(weights).hex() == driver.log.state.fragments[FRAGMENT].newest.digest


@settings(max_examples=15)
@given(seed=st.integers(0, 1000), rule=st.sampled_from(MergeRule), codec=st.sampled_from(Codec))
async def test_the_arithmetic_is_the_formulas_of_the_specification_bit_for_bit(
    seed: int, rule: MergeRule, codec: Codec
) -> None:
    encoding = Encoding(codec, block=4)
    driver = await trained(2, seed=seed, policy=Policy(merge=rule, update_encoding=encoding))
    theta, buf, residual = (
        values.copy() for values in (driver.state.weights, driver.state.momentum, driver.state.residual)
    )
    rng = np.random.default_rng(seed)
    deltas = rng.normal(size=(3, LAYOUT.numel)).astype(np.float32)
    pushed = [await driver.push(nth, delta, encoding=FLOAT32) for nth, delta in enumerate(deltas)]
    item = await driver.round(pushed, weights=[1, 2, 3], participation=0.75)

    def per_element(values: tuple[str, ...]) -> NDArray[np.float32]:
        numbers = float32s_from_hex(values)
        return np.repeat(numbers, [tensor.numel for tensor in LAYOUT.tensors])

    scalars = item.scalars
    rate, mu, decay, gain = (
        float32s_from_hex([value])[0] for value in (scalars.rate, scalars.momentum, scalars.decay, scalars.gain)
    )
    acc = per_element(item.scalars.coefficients[0]) * deltas[0]
    for c, v in zip(item.scalars.coefficients[1:], deltas[1:], strict=True):
        acc = acc + per_element(c) * v
    d = per_element(item.scalars.tensor_scales) * acc
    buf = decay * buf + gain * d
    target = residual + rate * (d + mu * buf)
    q = np.empty_like(target)
    list(encode_frames(target, LAYOUT, encoding, decoded=q))
    assert driver.state.weights.tobytes() == (theta - q).tobytes()
    assert driver.state.residual.tobytes() == (target - q).tobytes()
    assert driver.state.momentum.tobytes() == buf.tobytes()


async def test_a_snapshot_is_where_a_rebuild_begins() -> None:
    driver = await trained(5, snapshot_at=3)
    await driver.collect(*(name for version in (1, 2, 3) for name in driver.part_names(version)))
    assert_same_bits(await driver.replayer().rebuild(5, NO_FILES), driver.state)
    # Without their deltas, the versions before the snapshot are only known by the updates.
    with pytest.raises(ObjectMissingError):
        await driver.replayer().rebuild(2, NO_FILES)
    await driver.replayer().weights_at(2)


async def test_versions_on_both_sides_of_a_roll_back_can_be_rebuilt() -> None:
    driver = await trained(3)
    newest = [values.copy() for values in (driver.state.weights, driver.state.momentum)]
    await driver.roll_back(1)
    await driver.round([await driver.push(0, np.ones(LAYOUT.numel))])
    assert_same_bits(await driver.replayer().rebuild(5, NO_FILES), driver.state)
    abandoned = await driver.replayer().rebuild(3, NO_FILES)
    assert abandoned.weights.tobytes() == newest[0].tobytes()
    assert abandoned.momentum.tobytes() == newest[1].tobytes()
    along = await driver.replayer().weights_at(3)
    assert along.tobytes() == newest[0].tobytes()
    # A state from before the roll-back is carried over it as well.
    old = await driver.replayer().rebuild(2, NO_FILES)
    await driver.replayer().advance(old, 5, NO_FILES)
    assert_same_bits(old, driver.state)


async def test_threads_scratch_files_and_cuts_into_parts_change_no_bit(tmp_path: Path) -> None:
    # Larger than a batch of frames, and than a leaf of the digest; blocks of 128 straddle the leaves.
    layout = layout_of((1000, 999), (77,), (513, 1024))
    policy = Policy(update_encoding=Encoding(Codec.INT4))
    rng = np.random.default_rng(3)
    deltas = [rng.normal(size=layout.numel).astype(np.float32) for _ in range(2)]
    cuts = [layout.boundary_at_or_before(at, 4) for at in (10, 400_000, 999_003, 1_300_000)]
    workers = ThreadWorkers(2)
    plain = await Driver.start(layout, policy)
    threaded = await Driver.start(layout, policy, workers=workers)
    threaded.scratch = Scratch(tmp_path)
    await plain.round([await plain.push(nth, values, encoding=INT4) for nth, values in enumerate(deltas)])
    await threaded.round(
        [await threaded.push(nth, values, encoding=INT4, cuts=cuts) for nth, values in enumerate(deltas)]
    )
    assert_same_bits(plain.state, threaded.state)
    again = await threaded.replayer().rebuild(1, threaded.scratch)
    assert_same_bits(again, plain.state)
    assert tree_digest(again.weights).hex() == plain.log.state.fragments[FRAGMENT].newest.digest
    workers.close()


@pytest.mark.parametrize("codec", Codec)
async def test_parts_in_memory_are_merged_like_stored_ones_and_only_once(codec: Codec) -> None:
    layout = layout_of((1000, 999), (77,), (513, 1024))
    deltas = np.random.default_rng(3).normal(size=(2, layout.numel))
    stored, kept = [await Driver.start(layout, Policy(update_encoding=INT4)) for _ in range(2)]
    for driver in (stored, kept):
        items = [
            await driver.push(nth, values, encoding=Encoding(codec), cuts=[999_000], is_kept=driver is kept)
            for nth, values in enumerate(deltas)
        ]
        closing = await driver.close(items)
        if driver is kept:
            await driver.damage(items[0].parts[0].name)
        await driver.commit(await driver.merge(closing))
    assert_same_bits(stored.state, kept.state)
    with pytest.raises(UnreadableDeltaError):
        await kept.replayer().rebuild(1, NO_FILES)


async def test_an_update_in_several_objects_is_followed_like_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skerry_syncer.merge.merger.UPDATE_OBJECT_SPANS", 1)
    driver = await Driver.start(layout_of((1500, 999), (1000, 1000)), Policy(update_encoding=Encoding(Codec.INT4)))
    item = await driver.round([await driver.push(0, np.random.default_rng(0).normal(size=driver.layout.numel))])
    assert len(item.update) == 3
    weights = await driver.replayer().weights_at(1)
    assert weights.tobytes() == driver.state.weights.tobytes()


async def test_a_state_that_could_not_be_loaded_is_torn_and_refused() -> None:
    driver = await trained(1)
    initial = driver.log.state.fragments[FRAGMENT].versions[0]
    await driver.damage(initial.weights[0].name)
    with pytest.raises(UnreadableObjectError):
        await driver.replayer().load_snapshot(initial, driver.state)
    assert driver.state.version == TORN
    with pytest.raises(ValueError, match="advance"):
        await driver.replayer().advance(driver.state, 1, NO_FILES)


def snapshot_refs(driver: Driver, version: int) -> list[ObjectRef]:
    """Returns weights, momentum and residual of a version's snapshot."""
    state = driver.log.state.fragments[FRAGMENT].versions[version]
    return [*state.weights, *state.outer]


@pytest.mark.parametrize("part", [0, 1, 2], ids=["weights", "momentum", "residual"])
@pytest.mark.parametrize("is_lost", [False, True], ids=["flipped", "lost"])
async def test_a_damaged_snapshot_is_gone_around_by_an_older_one(part: int, is_lost: bool) -> None:
    driver = await trained(3, snapshot_at=3)
    name = snapshot_refs(driver, 3)[part].name
    if is_lost:
        await driver.objects.delete([f"{driver.log.prefix}/{name}"])
    else:
        await driver.damage(name)
    assert_same_bits(await driver.replayer().rebuild(3, NO_FILES), driver.state)
    weights = await driver.replayer().weights_at(3)
    assert weights.tobytes() == driver.state.weights.tobytes()


async def test_where_no_snapshot_is_left_one_is_named_and_all_are_tried_again() -> None:
    driver = await trained(3, snapshot_at=2)
    names = [refs.name for version in (0, 2) for refs in snapshot_refs(driver, version)]
    kept = {name: await driver.objects.get(f"{driver.log.prefix}/{name}") for name in names}
    for name in names:
        await driver.damage(name)
    for _ in range(2):
        with pytest.raises(UnreadableObjectError) as caught:
            await driver.replayer().rebuild(3, NO_FILES)
        assert caught.value.name in names
        with pytest.raises(UnreadableObjectError):
            await driver.replayer().weights_at(3)
    for name, data in kept.items():
        await driver.objects.delete([f"{driver.log.prefix}/{name}"])
        await driver.objects.write(f"{driver.log.prefix}/{name}", data)
    assert_same_bits(await driver.replayer().rebuild(3, NO_FILES), driver.state)
    assert not driver.run.blobs.unreadable


async def test_a_replica_that_was_away_goes_on_from_the_newest_snapshot() -> None:
    driver = await trained(0)
    late = await store_on(driver.objects).open_run(driver.log.spec.name, driver.log.spec.uid)
    merger = Merger(late, NO_FILES)

    async def merge_late() -> None:
        closing = await driver.close([await driver.push(0, np.ones(LAYOUT.numel))])
        await late.log.tail()
        await merger.merge(closing)
        await driver.log.tail()
        driver.state = await driver.replayer().rebuild(closing.version, NO_FILES)

    await merge_late()  # its cache has version 1 now
    missed = []
    for _ in range(2):
        missed.append(await driver.push(0, np.ones(LAYOUT.numel)))
        await driver.round(missed[-1:])
    await driver.snapshot()
    await driver.collect(*(part.name for delta in missed for part in delta.parts))
    await merge_late()
    assert late.state.fragments[FRAGMENT].version == 4
