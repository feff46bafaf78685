"""The run log of one run, as one replica reads and writes it.

Appends that wait at the same time go into one entry. A replica that loses a number to another folds the entries that it
missed and tries the next number. A write that failed is read back. If the store can't say whether it landed, callers
hear so, and what lands later is folded then. The log is read by asking for the next number, never by listing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final, NoReturn

from skerry.runtime.clock import Clock
from skerry.runtime.identifiers import Entropy
from skerry_syncer.store.errors import (
    LogCorruptError,
    ObjectMissingError,
    StoreError,
    StoreUnavailableError,
)
from skerry_syncer.store.log.entries import (
    Entry,
    Item,
    RunSpec,
    bytes_digest,
    canonical_json,
    entry_name,
    item_to_json,
    run_prefix,
)
from skerry_syncer.store.log.fold import apply_entry, check_item
from skerry_syncer.store.log.state import Outcome, RunState
from skerry_syncer.store.objects.interface import Objects
from skerry_syncer.store.objects.put_if_absent import create_or_read

GROUP_BYTES: Final = 2**20  # of appends in one entry, so that none takes long to read; a single one may be larger
MAX_APPEND_BYTES: Final = 16 * 2**20  # larger ones are refused: readers hold a whole entry in memory
_READ_AHEAD: Final = 64  # entries that a reader far behind asks for at the same time
_ANCHOR_CHECK_S: Final = 5.0  # between checks that an entry that was durable is still there

Subscriber = Callable[[Entry, tuple[Outcome, ...]], None]


class AppendTooLargeError(ValueError):
    """The items are too large for one entry, whatever else waits; nothing was written."""


@dataclass
class _Append:
    """Items whose caller waits for their outcomes."""

    items: tuple[Item, ...]
    size_bytes: int
    answer: asyncio.Future[tuple[Outcome, ...]]
    make: Callable[[RunState], Item] | None  # makes the only item anew, for the state that its entry follows


@dataclass
class _Sent:
    """The newest entry that this process sent to the store, which may land later than the store's answer says."""

    write_id: str
    outcomes: tuple[Outcome, ...] | None = None  # of its items, once it is folded


class RunLog:
    """One run's log, folded. Safe for concurrent use by tasks of one loop. A process must have one object per run.

    `state` is the fold of every entry read so far. Callers must not change it.
    """

    def __init__(
        self,
        objects: Objects,
        spec: RunSpec,
        *,
        clock: Clock,
        entropy: Entropy,
        writer: str,
        known: tuple[int, str] | None = None,
        state: RunState | None = None,
    ) -> None:
        """Reads on from `state`. The log must still have `known`, the position and digest of an entry seen before."""
        self.spec = spec
        self.state = state or RunState(spec)
        self.prefix = run_prefix(spec.name, spec.uid)
        self.objects = objects
        self.entropy = entropy
        self.clock = clock
        self._writer = writer
        self._created = partial(create_or_read, objects, clock=clock, entropy=entropy)
        self._waiting: list[_Append] = []
        self._sent = _Sent("")
        self._writing: asyncio.Task[None] | None = None
        self._subscribers: list[Subscriber] = []
        self._tail_lock = asyncio.Lock()
        self._tails_begun = self._tails_ended = 0
        # Why this object stopped reading and writing, if it did. It stays stopped, even if the store is repaired.
        self.failure: LogCorruptError | None = None
        self._anchor = known or (self.state.position, self.state.head_digest)
        self._anchor_checked_at = clock.monotonic_s() if known is None else -math.inf
        self._age_s, self._aged_at_s = self.state.age_s, clock.monotonic_s()

    @property
    def known(self) -> tuple[int, str]:
        """The newest position that this object or an earlier one has seen, and the digest of its entry."""
        return max((self.state.position, self.state.head_digest), self._anchor)

    def age_s(self) -> float:
        """Returns for how many seconds the run has been served: its time, for what is decided by time.

        That is what the newest entry says, and what has passed since this process wrote or read it, by its monotonic
        clock. So between two entries no more passes than really does, whatever calendar clocks say. Time in which no
        process that writes later had the log open is not in it, nor is that between an entry's writing and its reading.
        """
        return self._age_s + self.clock.monotonic_s() - self._aged_at_s

    async def append(self, items: Sequence[Item]) -> tuple[Outcome, ...]:
        """Puts `items` into the log, all in one entry, and returns the fold's outcome of each.

        Returns when the entry is durable and folded. If the fold at the log's end would reject all of the items,
        nothing is written and the rejections are returned. If the caller is cancelled before the items are sent, they
        are not written; after that they may or may not take effect, as after OutcomeUnknownError.

        Raises:
            OutcomeUnknownError: the store did not answer in time; the items may take effect, now or later. They may be
                appended again, because the fold admits each once.
            StoreUnavailableError: the store can't be read; nothing was written.
            NewerFormatError: the log goes on in a format that this version does not know. So from every method below.
            StoreFullError: no space; the items may still take effect.
            LogCorruptError: the store lost or changed what was durable.
            AppendTooLargeError: the items are too large for one entry.
            ValueError: an item is malformed.
        """
        return await self._append(tuple(items)) if items else ()

    async def append_made(self, make: Callable[[RunState], Item]) -> Outcome:
        """Appends the item that `make` returns for the state that its entry follows: nothing comes between the two.

        `make` may be called several times. It must not wait; what it raises is raised here.

        Raises:
            StoreError: as for `append`.
        """
        (outcome,) = await self._append((make(self.state),), make)
        return outcome

    async def _append(
        self, items: tuple[Item, ...], make: Callable[[RunState], Item] | None = None
    ) -> tuple[Outcome, ...]:
        self._raise_failure()
        size = sum(len(canonical_json(item_to_json(item))) for item in items)
        if size > MAX_APPEND_BYTES:
            raise AppendTooLargeError(f"append is too large for one entry. size_bytes={size}, limit={MAX_APPEND_BYTES}")
        loop = asyncio.get_running_loop()
        append = _Append(items, size, loop.create_future(), make)
        self._waiting.append(append)
        if self._writing is None or self._writing.done():
            self._writing = loop.create_task(self._write_waiting(), name=f"log-writer {self.spec.name}")
        return await append.answer

    async def tail(self) -> int:
        """Folds at least every entry that is in the log at the call, and returns the position reached.

        Raises:
            StoreUnavailableError: the store can't be read; what was read is folded.
            LogCorruptError: the store lost or changed what was durable.
        """
        begun = self._tails_begun
        async with self._tail_lock:
            # A read that began after this call serves every caller that waits here, so many callers cost two reads.
            if self._tails_ended <= begun:
                self._tails_begun += 1
                await self._read_to_end()
                self._tails_ended = self._tails_begun
        return self.state.position

    async def wait_for(self, position: int) -> None:
        """Folds at least to `position`, which the log is known to have reached.

        Raises:
            LogCorruptError: the log ends before `position`.
            StoreUnavailableError: the store can't be read.
        """
        self._raise_failure()
        if self.state.position >= position:
            return
        end = await self.tail()
        if end < position:
            raise LogCorruptError(f"log is shorter than was seen. run={self.spec.name}, seen={position}, end={end}")

    def subscribe(self, callback: Subscriber) -> Callable[[], object]:
        """Calls `callback` with every entry that is folded from now on, in order; returns a function that stops this.

        The callback must not block and must not raise.
        """
        self._subscribers.append(callback)
        return partial(self._subscribers.remove, callback)

    async def entries(self, start: int = 1, stop: int | None = None) -> AsyncIterator[tuple[Entry, bytes]]:
        """Yields the entries from position `start` to before `stop` or to the log's end, with their bytes.

        Raises:
            LogCorruptError: an entry is missing, or can't be read as one. The fold says if it follows the one before.
        """
        position = start
        while stop is None or position < stop:
            width = _READ_AHEAD if stop is None else min(_READ_AHEAD, stop - position)
            entries, _ = await self._read(position, width)
            for data in entries:
                yield self._parse(position, data), data
                position += 1
            if len(entries) < width:
                self._raise_failure()
                if position <= self.state.position:
                    raise LogCorruptError(f"log entry is missing. run={self.spec.name}, position={position}")
                return

    async def close(self) -> None:
        """Stops writing; appends that wait fail with StoreUnavailableError."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.wait([self._writing])
        self._fail(StoreUnavailableError("log was closed"))

    async def _write_waiting(self) -> None:
        """Writes entries until nothing waits, in a task of its own, so that cancelling a caller stops no other."""
        try:
            while self._waiting:
                try:
                    await self._check_anchor()
                    if group := await self._next_group():
                        await self._write(group)
                except StoreError as error:  # for all that wait, rather than let each wait through the outage again
                    self._fail(error)
                self._waiting = [append for append in self._waiting if not append.answer.done()]
        except BaseException as error:
            self._fail(StoreUnavailableError(f"log writer stopped. cause={error!r}"))
            raise

    def _fail(self, error: StoreError) -> None:
        for append in self._waiting:
            if not append.answer.done():
                append.answer.set_exception(error)

    async def _next_group(self) -> list[_Append]:
        """Returns the appends of the next entry, or none after it answered those without effect at the log's end."""
        group: list[_Append] = []
        size_bytes = 0
        for append in [append for append in self._waiting if not append.answer.done()]:  # but for cancelled ones
            size_bytes += append.size_bytes
            # A made item follows the state, so its entry has nothing before it.
            if group and (size_bytes > GROUP_BYTES or append.make is not None):
                break
            group.append(append)
        if group and group[0].make is not None:
            try:
                group[0].items = (group[0].make(self.state),)
            except Exception as error:  # noqa: BLE001 - the caller's own, who gets it
                group[0].answer.set_exception(error)
                return []
        if all(map(self._has_effect, group)):
            return group
        await self.tail()
        for append in group:
            if not self._has_effect(append) and not append.answer.done():
                append.answer.set_result(tuple(Outcome(item, check_item(self.state, item)) for item in append.items))
        return []

    def _has_effect(self, append: _Append) -> bool:
        # An item may only be admissible after another one of the same append, so one admissible item is enough.
        return any(check_item(self.state, item) is None for item in append.items)

    async def _write(self, group: list[_Append]) -> None:
        """Puts the group under the next number and answers it, unless another writer wins the number."""
        entry = Entry(
            position=self.state.position + 1,
            run_uid=self.spec.uid,
            previous=self.state.head_digest,
            writer=self._writer,
            write_id=self.entropy.hex_id(),
            written_at_unix_s=self.clock.unix_s(),
            age_s=round(self.age_s(), 3),
            items=tuple(item for append in group for item in append.items),
        )
        sent = self._sent = _Sent(entry.write_id)
        # If this raises, the entry may still land. It is then folded like another writer's.
        data = await self._created(entry_name(self.prefix, entry.position), entry.to_bytes())
        self._fold(entry.position, data)
        if sent.outcomes is None:
            await self.tail()
            return
        remaining = iter(sent.outcomes)
        for append in group:
            own = tuple(islice(remaining, len(append.items)))
            if not append.answer.done():
                append.answer.set_result(own)

    async def _read_to_end(self) -> None:
        self._raise_failure()
        width = 1 if self._tails_ended else 2  # the first time a gap is looked for, which must not be written to
        while True:
            first = self.state.position + 1
            entries, has_later = await self._read(first, width)
            if entries:
                # Another writer may have just published the entry. It must be durable before it is acted on.
                await self.objects.sync_parent(*(entry_name(self.prefix, first + nth) for nth in range(len(entries))))
            for position, data in enumerate(entries, first):
                self._fold(position, data)
            missing = first + len(entries)
            if has_later and await self._read_one(missing) is None:  # else it was written meanwhile
                self._fail_for_good(f"log entry is missing. run={self.spec.name}, position={missing}")
            if len(entries) == width:
                width = min(4 * width, _READ_AHEAD)
            elif entries and len(entries) == width - 1:
                width = 2  # the missing entry and the one behind it
            else:
                break
        await self._check_anchor()

    async def _read(self, first: int, count: int) -> tuple[list[bytes], bool]:
        """Returns the entries up to the first of `count` that is missing, and whether a later one of them is there."""
        found = await asyncio.gather(*(self._read_one(position) for position in range(first, first + count)))
        end = found.index(None) if None in found else count
        return [data for data in found[:end] if data is not None], any(data is not None for data in found[end:])

    async def _read_one(self, position: int) -> bytes | None:
        try:
            return await self.objects.get(entry_name(self.prefix, position))
        except ObjectMissingError:
            return None

    def _fold(self, position: int, data: bytes) -> None:
        """Applies the entry at `position`, unless it was applied before, and calls the subscribers."""
        if position <= self.state.position:
            return
        try:
            entry = self._parse(position, data)
            outcomes = apply_entry(self.state, entry, data)
        except LogCorruptError as error:
            self.failure = error
            raise
        if entry.write_id == self._sent.write_id:
            self._sent.outcomes = outcomes
        else:  # also if this process has served for longer: what its writer made must not seem as old as that
            self._age_s, self._aged_at_s = self.state.age_s, self.clock.monotonic_s()
        for callback in list(self._subscribers):
            callback(entry, outcomes)

    def _parse(self, position: int, data: bytes) -> Entry:
        try:
            return Entry.from_bytes(data)
        except ValueError as error:
            detail = f"run={self.spec.name}, position={position}, size_bytes={len(data)}, cause={error}"
            raise LogCorruptError(f"log entry can't be read. {detail}") from error

    async def _check_anchor(self) -> None:
        """Checks, every few seconds, that the entry that was newest at the last check is still there.

        To check the newest entry of now is not enough: if the store was rolled back, this replica may have written that
        entry itself since, and only its predecessors are missing.
        """
        self._raise_failure()
        now = self.clock.monotonic_s()
        if now - self._anchor_checked_at < _ANCHOR_CHECK_S:
            return
        position, digest = self._anchor
        following = (self.state.position, self.state.head_digest)
        data = await self._read_one(position) if position <= self.state.position else None
        actual = f"missing, log ends at {self.state.position}" if data is None else bytes_digest(data)
        if actual != digest:
            facts = f"run={self.spec.name}, position={position}, expected={digest}, actual={actual}"
            self._fail_for_good(f"store lost or changed a log entry that was durable. {facts}")
        self._anchor, self._anchor_checked_at = following, now

    def _fail_for_good(self, problem: str) -> NoReturn:
        self.failure = failure = LogCorruptError(problem)
        raise failure

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise self.failure
