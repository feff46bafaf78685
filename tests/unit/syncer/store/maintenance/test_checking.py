"""Verification finds what was changed behind the log's back, and takes no offence at what was collected."""

from __future__ import annotations

import numpy as np

from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import CollectedItem
from skerry_syncer.store.maintenance.checking import VerifyReport, position_before, verify_run, versions_since
from skerry_syncer.store.versions.scratch import Scratch
from tests.support.merge_driver import FRAGMENT, INT4, Driver, layout_of

LAYOUT = layout_of((6, 6), (4,))


async def trained(round_count: int = 4, *, snapshot_at: int = 2) -> Driver:
    """Returns an open run with some versions, and one more delta that is pending."""
    rng = np.random.default_rng(5)
    driver = await Driver.start(LAYOUT, Policy(update_encoding=INT4))
    for _ in range(round_count):
        deltas = [await driver.push(nth, rng.normal(size=LAYOUT.numel), encoding=INT4) for nth in range(2)]
        await driver.round(deltas, participation=0.5)
        if driver.state.version == snapshot_at:
            await driver.snapshot()
    await driver.push(3, rng.normal(size=LAYOUT.numel))
    return driver


def update_name(driver: Driver, version: int) -> str:
    record = driver.log.state.fragments[FRAGMENT].versions[version].commit
    assert record is not None
    return record.commit.update[0].name


async def test_a_sound_run_is_checked_and_replayed_whole() -> None:
    driver = await trained()
    heard: list[tuple[int, int]] = []
    report = await verify_run(
        driver.run,
        scratch=Scratch(None),
        progress=lambda done, total: heard.append((done, total)),
    )
    assert report == VerifyReport(versions_checked=5, versions_replayed=4, problems=())
    assert report.ok
    assert heard == [(done, 5) for done in range(1, 6)]


async def test_a_damaged_delta_is_named_and_the_chain_still_holds() -> None:
    driver = await trained()
    await driver.damage(driver.part_names(3)[1])
    report = await driver.verify()
    (problem,) = report.problems
    assert problem.startswith("body version 3: delta can't be read")
    assert driver.part_names(3)[1].split("/")[2] in problem
    # Version 4 has the state of version 3 no more, but its update still leads to its weights.
    assert (report.versions_checked, report.versions_replayed) == (5, 2)


async def test_a_damaged_update_is_found_and_later_versions_wait_for_a_snapshot() -> None:
    driver = await trained(snapshot_at=3)
    await driver.damage(update_name(driver, 2))
    (problem,) = (await driver.verify()).problems
    assert problem.startswith("body version 2: ")
    assert "other bytes" in problem


async def test_a_lost_object_is_a_problem_and_a_collected_one_is_not() -> None:
    driver = await trained()
    names = [*driver.part_names(1), update_name(driver, 1)]
    await driver.objects.delete([f"{driver.log.prefix}/{name}" for name in names])
    (problem,) = (await driver.verify()).problems
    assert problem.startswith("body version 1: ")
    await driver.append(CollectedItem(tuple(names)))
    report = await driver.verify()
    assert report.ok
    # Version 1 can't be checked any more, 2 only by its snapshot, and from there all is replayed.
    assert (report.versions_checked, report.versions_replayed) == (4, 2)


async def test_a_damaged_snapshot_of_the_outer_state_is_found() -> None:
    driver = await trained()
    outer = driver.log.state.fragments[FRAGMENT].versions[2].outer
    await driver.damage(outer[0].name)
    (problem,) = (await driver.verify()).problems
    assert problem.startswith("body version 2: ")
    assert outer[0].name in problem


async def test_an_entry_that_was_changed_breaks_the_log() -> None:
    driver = await trained()
    path = f"{driver.log.prefix}/log/{3:020}"
    data = await driver.objects.get(path)
    await driver.objects.delete([path])
    await driver.objects.write(path, data.replace(b'"writer":"test"', b'"writer":"evil"'))
    (problem,) = (await driver.verify()).problems
    assert problem.startswith("log breaks off after entry 3: ")


async def test_a_log_that_lost_its_end_is_found() -> None:
    driver = await trained()
    end = driver.log.state.position
    await driver.objects.delete([f"{driver.log.prefix}/log/{end:020}"])
    (problem,) = (await driver.verify()).problems
    assert problem == f"log breaks off after entry {end - 1}: log entry is missing. run=run, position={end}"


async def test_an_entry_behind_a_gap_is_found_however_wide_the_gap_is() -> None:
    driver = await trained()
    end = driver.log.state.position
    await driver.objects.create(f"{driver.log.prefix}/log/{end + 9:020}", b"an entry")
    (problem,) = (await driver.verify()).problems
    assert problem == f"log breaks off after entry {end}: log entry is missing. position={end + 1}, last={end + 9}"


async def test_since_a_position_or_a_time_are_the_versions_that_were_the_newest_then() -> None:
    state = (await trained(6)).log.state
    fragment = state.fragments[FRAGMENT]
    for version in fragment.versions.values():
        version.made_at_age_s = 10.0 * version.version
    state.age_s = 62.0
    assert versions_since(fragment, fragment.versions[4].position + 1) == [4, 5, 6]
    assert versions_since(fragment, position_before(state, 15.0)) == [4, 5, 6], "4 until 12 s before the end"
    assert versions_since(fragment, position_before(state, 1.0)) == [6]
