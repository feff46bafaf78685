"""What a run log keeps of the appends that wait, and of the entry that it has sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from skerry_syncer.store.log.entries import Item
from skerry_syncer.store.log.state import Outcome, RunState


@dataclass
class Waiter:
    """An append whose caller waits for the outcome."""

    items: tuple[Item, ...]
    size_bytes: int
    answer: asyncio.Future[tuple[Outcome, ...]]
    make: Callable[[RunState], Item] | None = None  # makes `items` anew from the state that the entry follows

    def remake(self, state: RunState) -> bool:
        """Makes the items for an entry that follows `state`; returns false if they can't be made any more."""
        if self.make is None:
            return True
        try:
            self.items = (self.make(state),)
        except Exception as error:  # noqa: BLE001 - the caller's own, who gets it
            self.answer.set_exception(error)
            return False
        return True


@dataclass(frozen=True)
class Sent:
    """An entry that was sent to the store and may or may not have landed."""

    position: int
    write_id: str
    data: bytes
