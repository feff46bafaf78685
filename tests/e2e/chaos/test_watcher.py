"""What the auditor of a storm makes of a store in which nothing happened yet."""

from __future__ import annotations

from tests.e2e.chaos.watcher import Watcher
from tests.support.dict_objects import DictObjects


async def test_it_looks_again_for_a_run_that_nobody_has_created_yet() -> None:
    watcher = Watcher(DictObjects(), seed=0, say=print)
    await watcher.look()
    assert watcher.state is None
    assert watcher.findings == []
