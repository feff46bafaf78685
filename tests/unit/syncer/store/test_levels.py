"""A run keeps to its format level, so that the version before this one and this one can serve it in any order.

`previous_version.txt` names the last commit of the version before. The tests build it from git and run it in processes
of its own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry_syncer.store.errors import NewerFormatError
from skerry_syncer.store.log.entries import ENTRY_FORMAT, OLDEST_LEVEL, RUN_FORMAT, Entry, LevelItem, entry_name
from skerry_syncer.store.objects.opening import open_objects
from tests.unit.syncer.store.test_run_log import SPEC, UID, Bench, on_virtual_time

ROOT = Path(__file__).parents[4]
WORKER = Path(__file__).with_name("level_worker.py")
PREVIOUS = Path(__file__).with_name("previous_version.txt").read_text().strip()
PACKAGES = ("protos", "core", "client", "services")
# 10,000, as .ci/run has it, take over a minute.
OPERATION_COUNT = int(os.environ.get("SKERRY_LEVEL_OPERATIONS", "2000"))
BATCH = 100


@pytest.fixture(scope="session")
def previous_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the previous version."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("the previous version is built from git, which is not here")
    folder = tmp_path_factory.mktemp("previous")
    archive = folder / "previous.tar"
    made = subprocess.run(
        [git, "-C", str(ROOT), "archive", "--output", str(archive), PREVIOUS, *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode != 0:
        pytest.skip(f"git has not got the previous version, as in a shallow clone: {made.stderr.strip()}")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder


@pytest.fixture
def url() -> Iterator[str]:
    """A store in memory where the machine has such a folder, because every append is synced."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        open_objects(f"file://{folder}/store")
        yield f"file://{folder}/store"


class Version:
    """A replica in a process of one version."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, **command: object) -> dict[str, Any]:
        self.send(**command)
        return self.answer()


@contextmanager
def version_of(root: Path, url: str) -> Iterator[Version]:
    """Yields a replica of the version whose source is at `root`."""
    paths = os.pathsep.join(str(root / package) for package in PACKAGES)
    process = subprocess.Popen(
        [sys.executable, str(WORKER), url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    with process:
        yield Version(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1])
def test_the_previous_version_and_this_one_work_on_one_run_in_any_order(
    previous_root: Path, url: str, seed: int
) -> None:
    source = random.Random(seed)
    with version_of(previous_root, url) as old, version_of(ROOT, url) as new:
        assert [old.ask(do="open"), new.ask(do="open")] == [{}, {}]
        for _ in range(OPERATION_COUNT // BATCH):
            left = BATCH
            while left > 0:
                count = min(left, source.randint(1, 8))
                first, second = source.sample([old, new], 2)
                first.send(do="turn", seed=source.getrandbits(32), count=count)
                left -= count
                if left > 0 and source.random() < 0.2:  # both at once
                    count = min(left, source.randint(1, 8))
                    second.send(do="turn", seed=source.getrandbits(32), count=count)
                    left -= count
                    assert second.answer() == {}
                assert first.answer() == {}
            told = old.ask(do="fold")
            assert told == new.ask(do="fold")
        assert min(told["versions"]) > OPERATION_COUNT / 100, "rounds were merged"
        assert told["position"] > OPERATION_COUNT / 2, "most items were admitted"


def test_the_previous_version_refuses_a_run_that_was_raised_and_this_one_goes_on(previous_root: Path, url: str) -> None:
    with version_of(previous_root, url) as old, version_of(ROOT, url) as new:
        assert [old.ask(do="open"), new.ask(do="open")] == [{}, {}]
        assert old.ask(do="turn", seed=1, count=20) == {}
        assert new.ask(do="raise", level=ENTRY_FORMAT) == {}
        assert new.ask(do="turn", seed=2, count=20) == {}
        before = new.ask(do="fold")
        assert old.ask(do="turn", seed=3, count=1) == {"error": "STORE_ROLLED_BACK"}
        assert new.ask(do="fold") == before, "the previous version wrote nothing"


@on_virtual_time
async def test_a_run_writes_its_own_level_until_an_item_raises_it(bench: Bench) -> None:
    log = await bench.store().create_draft(SPEC)
    other = await bench.store().open_log("run", UID)
    await log.append([bench.policy()])
    assert log.state.level == OLDEST_LEVEL
    outcomes = await log.append([LevelItem(ENTRY_FORMAT), bench.policy()])
    assert [outcome.rejection for outcome in outcomes] == [None, None]
    await other.append([bench.policy()])  # from a view from before the raise
    assert log.state.level == other.state.level == ENTRY_FORMAT
    for level in (OLDEST_LEVEL, ENTRY_FORMAT):
        (outcome,) = await log.append([LevelItem(level)])
        assert outcome.rejection is not None, "a level is never lowered, nor raised twice"
    formats = [entry.format async for entry, _ in log.entries()]
    assert formats == [OLDEST_LEVEL, ENTRY_FORMAT, ENTRY_FORMAT]


@on_virtual_time
async def test_a_log_that_goes_on_in_a_newer_format_is_no_damage(bench: Bench) -> None:
    log = await bench.store().create_draft(SPEC)
    await log.append([bench.policy()])
    newer = Entry(2, UID, log.state.head_digest, "newer", "0" * 32, 0.0, (), ENTRY_FORMAT + 1)
    bench.shared.objects[entry_name(log.prefix, 2)] = (newer.to_bytes(), 0.0)
    with pytest.raises(NewerFormatError):
        await log.append([bench.policy()])
    with pytest.raises(NewerFormatError):
        await log.tail()
    with pytest.raises(NewerFormatError):
        await bench.store().open_log("run", UID)
    assert log.failure is None
    assert log.state.position == 1, "what was readable stays folded"


def test_an_entry_that_raises_the_level_above_its_own_format_is_malformed() -> None:
    entry = Entry(1, UID, "", "w", "0" * 32, 0.0, (LevelItem(ENTRY_FORMAT),), OLDEST_LEVEL)
    with pytest.raises(ValueError, match="level"):
        Entry.from_bytes(entry.to_bytes())


@on_virtual_time
async def test_names_and_specs_of_a_newer_format_are_no_damage(bench: Bench) -> None:
    store = bench.store()
    log = await store.create_draft(SPEC)
    await store.publish("run", UID)
    for name in (f"{log.prefix}/run.json", f"runs/run/names/{1:020}"):
        values = json.loads(bench.shared.objects[name][0]) | {"format": RUN_FORMAT + 1}
        bench.shared.objects[name] = (json.dumps(values).encode(), 0.0)
    with pytest.raises(NewerFormatError):
        await bench.store().open_log("run", UID)
    with pytest.raises(NewerFormatError):
        await store.resolve("run")
