"""Appending and following: what a caller of the log may rely on, one promise a test."""

import asyncio
from collections.abc import Callable

import pytest

from skerry_syncer.store.errors import (
    LogCorruptError,
    NewerFormatError,
    ObjectExistsError,
    OutcomeUnknownError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from skerry_syncer.store.log.entries import FORMAT, CollectedItem, Entry, entry_name
from skerry_syncer.store.log.run_log import GROUP_BYTES, RunLog
from skerry_syncer.store.store import Store
from tests.support.faulty_objects import NO_FAULT, Effect, Fault
from tests.support.log_bench import SPEC, UID, Bench, on_virtual_time


def first(operation: str, *faults: Fault) -> Callable[[str, str], Fault]:
    """Gives the first calls of an operation on log entries these faults."""
    left = list(faults)

    def schedule(called: str, name: str) -> Fault:
        return left.pop(0) if left and called == operation and "/log/" in name else NO_FAULT

    return schedule


def entry_count(bench: Bench) -> int:
    return sum("/log/" in name for name in bench.shared.objects)


@on_virtual_time
async def test_what_waits_while_an_entry_is_written_goes_into_the_next(bench: Bench) -> None:
    log = await bench.log(lambda operation, _: Fault(latency_s=1.0))
    early = asyncio.ensure_future(log.append([bench.policy()]))
    await asyncio.sleep(0.5)
    later = [asyncio.ensure_future(log.append([bench.policy()])) for _ in range(9)]
    await asyncio.gather(early, *later)
    assert entry_count(bench) == 2


@on_virtual_time
async def test_groups_are_split_where_an_entry_would_grow_too_large(bench: Bench) -> None:
    log = await bench.log()
    names = tuple(f"deltas/body/{number:032}" for number in range(10_000))  # about 450 kB
    await asyncio.gather(*(log.append([CollectedItem(names)]) for _ in range(5)))
    sizes = [len(data) for name, (data, _) in bench.shared.objects.items() if "/log/" in name]
    assert len(sizes) == 3
    assert max(sizes) < GROUP_BYTES + 1000


@on_virtual_time
async def test_a_cancelled_caller_takes_only_its_own_items_back(bench: Bench) -> None:
    log = await bench.log(lambda operation, _: Fault(latency_s=1.0))
    callers = [asyncio.ensure_future(log.append([bench.policy()])) for _ in range(2)]
    await asyncio.sleep(0.5)  # both are under way
    waiting = [asyncio.ensure_future(log.append([bench.policy()])) for _ in range(3)]
    await asyncio.sleep(0)
    callers[0].cancel()
    waiting[1].cancel()
    await asyncio.gather(callers[1], waiting[0], waiting[2])
    assert len(log.state.requests) == 4, "what was sent took effect, what had not been sent did not"


@on_virtual_time
async def test_the_loser_of_a_number_folds_the_winner_and_takes_the_next(bench: Bench) -> None:
    one, other = await bench.log(), await bench.log()
    seen: list[int] = []
    other.subscribe(lambda entry, _: seen.append(entry.position))
    await one.append([bench.policy()])
    await other.append([bench.policy()])
    assert (entry_count(bench), other.state.position, seen) == (2, 2, [1, 2])


@on_virtual_time
async def test_items_without_effect_are_answered_from_the_logs_end_and_not_written(bench: Bench) -> None:
    one, other = await bench.log(), await bench.log()
    item = bench.policy()
    await one.append([item])
    (outcome,) = await other.append([item])
    assert outcome.rejection is not None
    assert outcome.rejection.reason == "ID_REUSED"
    assert entry_count(bench) == 1
    assert other.state.position == 1


@pytest.mark.parametrize("effect", [Effect.ERROR_BEFORE, Effect.ERROR_AFTER, Effect.LATE])
@pytest.mark.parametrize("error", [StoreUnavailableError, ObjectExistsError])
@on_virtual_time
async def test_a_create_that_failed_is_read_back_and_has_one_effect(
    bench: Bench, effect: Effect, error: type[StoreError]
) -> None:
    log = await bench.log(first("create", Fault(effect=effect, error=error, landing_s=0.02)))
    (outcome,) = await log.append([bench.policy()])
    await bench.late.land()
    assert outcome.rejection is None
    assert (entry_count(bench), log.state.position) == (1, 1)


@on_virtual_time
async def test_a_caller_hears_unknown_only_after_patience_and_repeating_is_safe(bench: Bench) -> None:
    is_down = True
    down = Fault(effect=Effect.ERROR_BEFORE)
    store = bench.store(lambda _, name: down if is_down and "/log/" in name else NO_FAULT)
    is_down = False
    log = (await store.create_draft(SPEC)).log
    is_down = True
    item = bench.policy()
    started = bench.clock.monotonic_s()
    with pytest.raises(OutcomeUnknownError):
        await log.append([item])
    assert bench.clock.monotonic_s() - started >= 20
    is_down = False
    await log.append([item])
    assert [outcome.rejection for outcome in await log.append([bench.policy()])] == [None]
    assert item.request_id in log.state.requests
    entries = [entry async for entry, _ in log.entries()]
    assert sum(found == item for entry in entries for found in entry.items) == 1


@on_virtual_time
async def test_a_full_store_is_said_at_once_and_a_repetition_goes_through_when_there_is_room(bench: Bench) -> None:
    full = Fault(effect=Effect.ERROR_BEFORE, error=StoreFullError)
    log = await bench.log(first("create", full))
    item = bench.policy()
    with pytest.raises(StoreFullError):
        await log.append([item])
    assert bench.clock.monotonic_s() < 1
    await log.append([item])
    assert list(log.state.requests) == [item.request_id]


@on_virtual_time
async def test_a_runs_age_goes_on_from_its_newest_entry_however_long_a_reader_has_waited(bench: Bench) -> None:
    waiting = await bench.log()
    await asyncio.sleep(360_000)
    writer = await bench.log()
    await asyncio.sleep(10)
    await writer.append([bench.policy()])
    await waiting.tail()
    await asyncio.sleep(10)
    assert waiting.age_s() == writer.age_s() == pytest.approx(20, abs=0.1)


@on_virtual_time
async def test_many_callers_that_want_the_end_cost_two_reads(bench: Bench) -> None:
    log = await bench.log(lambda *_: Fault(latency_s=0.1))
    before = bench.operations["get"]
    await asyncio.gather(*(log.tail() for _ in range(100)))
    assert bench.operations["get"] - before == 2


@on_virtual_time
async def test_a_cold_replica_reads_ahead_and_never_lists_the_log(bench: Bench) -> None:
    log = await bench.log()
    for _ in range(100):
        await log.append([bench.policy()])
    started = bench.clock.monotonic_s()
    cold = await bench.store(lambda operation, _: Fault(latency_s=1.0) if operation == "get" else NO_FAULT).open_run(
        "run", UID
    )
    assert cold.state.head_digest == log.state.head_digest
    assert bench.clock.monotonic_s() - started < 15
    assert bench.operations["list"] == 2, "each looked for checkpoints once"


@on_virtual_time
async def test_waiting_for_a_position_that_the_log_does_not_have_says_that_it_shrank(bench: Bench) -> None:
    one, other = await bench.log(), await bench.log()
    await one.append([bench.policy()])
    await other.wait_for(1)
    with pytest.raises(LogCorruptError) as caught:
        await other.wait_for(2)
    assert caught.value.reason == "STORE_ROLLED_BACK"
    await other.append([bench.policy()])  # what a caller claims does not stop the log


async def log_of_three(bench: Bench, store: Store) -> RunLog:
    """Returns the log after three entries, that are known to be durable."""
    log = (await store.create_draft(SPEC)).log
    for _ in range(3):
        await log.append([bench.policy()])
    await asyncio.sleep(6)
    await log.tail()
    return log


@pytest.mark.parametrize("damage", ["removed", "changed"])
@pytest.mark.parametrize("is_writing", [False, True])
@on_virtual_time
async def test_a_store_that_lost_what_it_had_is_detected_and_nothing_more_is_acknowledged(
    bench: Bench, damage: str, is_writing: bool
) -> None:
    log = await log_of_three(bench, bench.store())
    name = entry_name(log.prefix, 3)
    del bench.shared.objects[name]
    if damage == "changed":
        bench.shared.objects[name] = (b"{}", 0.0)

    async def go_on() -> None:
        for _ in range(3):
            if is_writing:
                await log.append([bench.policy()])
            await asyncio.sleep(4)
            await log.tail()

    for attempt in (go_on(), log.tail(), log.append([bench.policy()]), log.wait_for(1)):
        with pytest.raises(LogCorruptError):
            await attempt


@pytest.mark.parametrize("lost", [[0, 1, 2, 3], [3], [1], [2], [0]], ids=["all", "newest", "oldest", "middle", "spec"])
@on_virtual_time
async def test_a_store_that_comes_back_whole_is_served_again_and_no_other(bench: Bench, lost: list[int]) -> None:
    store = bench.store()
    log = await log_of_three(bench, store)
    digest, whole = log.state.head_digest, dict(bench.shared.objects)
    for position in lost:
        del bench.shared.objects[entry_name(log.prefix, position)]
    if 3 not in lost:  # then only a fold from the start meets it
        bench.shared.objects[entry_name(log.prefix, 4)] = (b"", 0.0)
    await asyncio.sleep(6)
    with pytest.raises(LogCorruptError):
        await log.tail()
    for _ in range(3):
        with pytest.raises(LogCorruptError):
            await store.open_run("run", UID)
        await asyncio.sleep(6)
    bench.shared.objects = whole
    again = (await store.open_run("run", UID)).log
    assert again.state.head_digest == digest
    await again.append([bench.policy()])
    assert (await store.open_run("run", UID)).log is again


@on_virtual_time
async def test_a_log_that_lost_its_end_is_not_served_again_after_others_wrote_on(bench: Bench) -> None:
    store = bench.store()
    log = await log_of_three(bench, store)
    del bench.shared.objects[entry_name(log.prefix, 3)]
    await asyncio.sleep(6)
    with pytest.raises(LogCorruptError):
        await log.tail()
    stranger = (await bench.store().open_run("run", UID)).log
    for _ in range(2):
        await stranger.append([bench.policy()])
    with pytest.raises(LogCorruptError, match="position=3"):
        await store.open_run("run", UID)


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format": 0}'])
@on_virtual_time
async def test_an_entry_that_is_not_one_stops_the_reader_with_its_position(bench: Bench, data: bytes) -> None:
    log = await bench.log()
    bench.shared.objects[entry_name(log.prefix, 1)] = (data, 0.0)
    with pytest.raises(LogCorruptError, match="position=1"):
        await log.tail()


@on_virtual_time
async def test_a_closed_log_answers_who_waits(bench: Bench) -> None:
    log = await bench.log(first("create", Fault(latency_s=3600.0)))
    caller = asyncio.ensure_future(log.append([bench.policy()]))
    await asyncio.sleep(1)
    await log.close()
    with pytest.raises(StoreUnavailableError):
        await caller


@on_virtual_time
async def test_a_log_that_goes_on_in_a_newer_format_is_no_damage(bench: Bench) -> None:
    log = await bench.log()
    await log.append([bench.policy()])
    newer = Entry(2, UID, log.state.head_digest, "newer", "0" * 32, 0.0, (), FORMAT + 1)
    bench.shared.objects[entry_name(log.prefix, 2)] = (newer.to_bytes(), 0.0)
    with pytest.raises(NewerFormatError):
        await log.append([bench.policy()])
    with pytest.raises(NewerFormatError):
        await log.tail()
    with pytest.raises(NewerFormatError):
        await bench.store().open_run("run", UID)
    assert log.failure is None
    assert log.state.position == 1, "what was readable stays folded"
