"""Clients of several replicas: real processes on one store, of which any may be killed."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest

from skerry import ArrayLearner, Policy, RunsClient, SkerryError, array_learner
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.loop_thread import LoopThread
from skerry.net.replicas import Connection
from skerry.v1 import capabilities_pb2
from skerry_syncer.store.log.entries import Fate
from tests.support.audit import check_fates, final_state
from tests.support.heard_logs import heard_logs
from tests.support.quadratic import Quadratic
from tests.support.serve_process import ServeProcess
from tests.support.tcp_link import Link

# Nothing expires, so that every step ends in a merge.
POLICY = Policy(inner_step_count=8, lease_term_s=2.0, quarantine_ratio=0.0, max_staleness=10_000)
# Long for a client that has noticed; one that had to be told by keep-alive would need 50 s.
FAIL_OVER_S = 5.0
# Within which a client connects again to a replica that is back.
RECONNECT_S = 2.5
ASK = capabilities_pb2.GetCapabilitiesRequest()


class TwoReplicas:
    """Two `skerry serve` on one store, for callers that are not asynchronous."""

    def __init__(self, folder: Path) -> None:
        self.store_url = (folder / "store").as_uri()
        self.thread = LoopThread("replicas")
        folders = [folder / name for name in ("a", "b")]
        for each in folders:
            each.mkdir()
        self.processes = [ServeProcess(self.store_url, each) for each in folders]
        for process in self.processes:
            self.thread.run(process.start())
        self.links = [Link(process.port) for process in self.processes]
        for link in self.links:
            self.thread.run(link.open(0))

    @property
    def relayed(self) -> str:
        """The addresses of both links, through which all bytes pass."""
        return ",".join(f"127.0.0.1:{link.port}" for link in self.links)

    @property
    def target(self) -> str:
        """Both addresses."""
        return ",".join(f"127.0.0.1:{process.port}" for process in self.processes)

    def kill(self, at: int) -> None:
        """Kills one with SIGKILL."""
        self.thread.run(self.processes[at].kill())

    def hang(self, at: int, how: str) -> None:
        """Has one hang: its process or its event loop stands still, or nothing passes its link, or its connections."""
        process, link = self.processes[at], self.links[at]
        hangs = {
            "stopped": process.stop_running,
            "stuck": process.block_loop,
            "swallowed": link.swallow,
            "half-open": link.freeze,
        }
        self.thread.call(hangs[how])

    def go_on(self, at: int) -> None:
        """Has one that was stopped go on."""
        self.thread.call(self.processes[at].go_on)

    def start(self, at: int) -> None:
        """Starts it again, on its port."""
        self.thread.run(self.processes[at].start())

    def close(self) -> None:
        """Ends both."""
        for link in self.links:
            self.thread.run(link.close())
        for process in self.processes:
            self.thread.run(process.stop())
        self.thread.close()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[TwoReplicas]:
    found = TwoReplicas(tmp_path)
    try:
        yield found
    finally:
        found.close()


class Trainer:
    """A learner that trains on a thread of its own, and notes how long it was detached at a time."""

    def __init__(self, target: str, name: str, seed: int, *, pause_s: float = 0.0, policy: Policy = POLICY) -> None:
        self._problem = Quadratic(seed)
        self._pause_s = pause_s
        self._stop = threading.Event()
        self.longest_detached_s = 0.0
        self.learner = ArrayLearner(
            self._problem.arrays, target=target, run="fit", learner_id=name, create=True, policy=policy
        )
        self._thread = threading.Thread(target=self._train, name=name)
        self._thread.start()

    def _train(self) -> None:
        attached_at_s = time.monotonic()
        while not self._stop.is_set():
            self.learner.step(tokens=8, loss=self._problem.descend())
            time.sleep(self._pause_s)
            now_s = time.monotonic()
            self.longest_detached_s = max(self.longest_detached_s, now_s - attached_at_s)
            if self.learner.stats.is_attached:
                attached_at_s = now_s

    def until_merged(self, more: int) -> None:
        """Returns once so many more of its deltas are merged."""
        wanted, deadline_s = self.learner.stats.deltas_merged + more, time.monotonic() + 60
        while self.learner.stats.deltas_merged < wanted:
            assert time.monotonic() < deadline_s, self.learner.stats
            time.sleep(0.02)

    def give_up(self) -> None:
        """Ends the training, whatever is unsent."""
        self._stop.set()
        self._thread.join()
        self.learner.close()

    def stop(self) -> int:
        """Ends the training, sends what is unsent, and returns the number of steps."""
        self._stop.set()
        self._thread.join()
        assert self.learner.flush(30), self.learner.stats
        assert self.learner.failure is None
        self.learner.close()
        return self.learner.stats.step_count


@pytest.mark.timeout(300)
def test_killing_either_replica_under_load_costs_no_learner_a_step(replicas: TwoReplicas) -> None:
    learners = {name: Trainer(replicas.target, name, seed) for seed, name in enumerate(("us", "eu", "ap", "sa"))}
    try:
        for each in learners.values():
            each.until_merged(2)
        for at in (0, 1, 0):
            replicas.kill(at)
            for each in learners.values():
                each.until_merged(3)
            replicas.start(at)
    finally:
        step_counts = {name: each.stop() for name, each in learners.items()}
    with RunsClient(replicas.target) as client:
        run = client.close_run("fit")
    state = asyncio.run(final_state(replicas.store_url, "fit", run.uid))
    assert check_fates(state, set())[Fate.QUARANTINED] == 0
    # Every learner has 2 fragments; each of its steps is in one merged delta of each, and in no other.
    merged = {name: dict.fromkeys(state.fragments, 0) for name in learners}
    for delta in state.deltas.values():
        if delta.fate is Fate.MERGED and delta.item.learner in merged:
            merged[delta.item.learner][delta.item.fragment] += delta.item.step_count
    assert merged == {name: dict.fromkeys(state.fragments, count) for name, count in step_counts.items()}
    detached_s = {name: round(each.longest_detached_s, 3) for name, each in learners.items()}
    print(f"longest time without an attached stream: {detached_s}")
    assert max(detached_s.values()) < FAIL_OVER_S


def test_a_command_does_not_notice_that_one_of_the_replicas_is_dead(replicas: TwoReplicas) -> None:
    with RunsClient(replicas.target) as client:
        client.create_run("fit", {"bias": np.zeros(4, np.float32)})
        for dead in (0, 1):
            replicas.kill(dead)
            for _ in range(3):
                assert [run.name for run in client.list_runs()] == ["fit"]
            with RunsClient(replicas.target) as late:
                assert late.get_run("fit").run.name == "fit"
            replicas.start(dead)


# From the hang of a replica to the next acknowledgement by another: what a learner may notice of it.
HANG_S = 10.0
_CALLED: ContextVar[str] = ContextVar("the replica that the call at hand goes to")


class Stage(NamedTuple):
    """A moment in a call: so many of its messages have been sent, or received; as it begins none were sent."""

    method: str
    sent_count: int | None = None
    received_count: int | None = None


class StagedTransport(GrpcTransport):
    """The product's transport; tells which replica a call goes to when one comes to the stage."""

    def __init__(self, *given: Any, stage: Stage, reach: Callable[[str], None], **options: Any) -> None:
        super().__init__(*given, **options)
        self._stage, self._on_reach = stage, reach

    def _called(self, connection: Connection, open_call: Callable[[Any], Any], **options: Any) -> Any:
        return super()._called(connection, lambda connection: open_call(self._watched(connection)), **options)

    def _watched(self, connection: Connection) -> Any:
        def begin(method: str) -> None:
            _CALLED.set(connection.replica.name)
            self._reach(method, sent_count=0)

        return Watched(connection, begin)

    def _reach(self, method: str, **counts: int) -> None:
        if Stage(method, **counts) == self._stage:
            self._on_reach(_CALLED.get())

    async def _sending(self, method: str, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        count = 0
        async for request in requests:
            yield request
            count += 1
            self._reach(method, sent_count=count)

    async def _receiving(self, method: str, responses: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(responses):
            count = 0
            async for response in responses:
                yield response
                count += 1
                self._reach(method, received_count=count)

    def attach(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Attaches."""
        return self._receiving("Attach", super().attach(self._sending("Attach", requests)))

    def pull_fragment(self, request: Any) -> AsyncGenerator[Any, None]:
        """Downloads."""
        return self._receiving("PullFragment", super().pull_fragment(request))

    async def push_delta(self, requests: AsyncIterator[Any]) -> Any:
        """Pushes."""
        answer = await super().push_delta(self._sending("PushDelta", requests))
        self._reach("PushDelta", received_count=1)
        return answer


class Watched:
    """An object whose methods that are RPCs are told of as they begin, however deep inside they are."""

    def __init__(self, watched: Any, begin: Callable[[str], None]) -> None:
        self._watched, self._begin = watched, begin

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._watched, name)
        if not name[0].isupper():
            return Watched(value, self._begin)

        def call(*given: Any, **options: Any) -> Any:
            self._begin(name)
            return value(*given, **options)

        return call


class Hanging:
    """Has the replica hang to which a call goes that comes to a stage, once it is armed; the first such call only."""

    def __init__(self, replicas: TwoReplicas, how: str, target: str) -> None:
        self._replicas, self._how = replicas, how
        self._names = target.split(",")
        self.is_armed = False
        self.at_s: float | None = None

    def __call__(self, name: str) -> None:
        """Takes note that a call to a replica has come to the stage."""
        if self.is_armed and self.at_s is None:
            self.at_s = time.monotonic()
            self._replicas.hang(self._names.index(name), self._how)

    def until(self, is_over: Callable[[], bool]) -> float:
        """Returns the seconds from the hang until something holds."""
        deadline_s = time.monotonic() + 90
        while self.at_s is None or not is_over():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        return time.monotonic() - self.at_s


@contextmanager
def staged(replicas: TwoReplicas, target: str, stage: Stage, how: str) -> Iterator[Hanging]:
    """Has a replica hang when a call of a learner that is made inside the context comes to the stage."""
    hanging = Hanging(replicas, how, target)
    with patch.object(array_learner, "GrpcTransport", partial(StagedTransport, stage=stage, reach=hanging)):
        yield hanging


# A push of this model sends a header, a part, its bytes, its end, and the end of the push.
TRAINING: Final = {
    "push begins": Stage("PushDelta", sent_count=0),
    "push in a part": Stage("PushDelta", sent_count=3),
    "push before its end": Stage("PushDelta", sent_count=4),
    "push before its answer": Stage("PushDelta", sent_count=5),
    "merge": Stage("PushDelta", received_count=1),
    "download begins": Stage("PullFragment", sent_count=0),
    "download before its bytes": Stage("PullFragment", received_count=1),
    "report": Stage("Attach", sent_count=3),
}
JOINING: Final = ("GetCapabilities", "GetRun", "CreateRun", "PushDelta", "CommitRun", "PullFragment", "Attach")


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("stage", "how"),
    [
        *((stage, "stopped") for stage in TRAINING),
        *((stage, how) for stage in ("push before its answer", "report") for how in ("stuck", "swallowed")),
    ],
)
def test_a_replica_that_hangs_delays_acknowledgements_by_seconds(replicas: TwoReplicas, stage: str, how: str) -> None:
    target = replicas.relayed if how == "swallowed" else replicas.target
    with staged(replicas, target, TRAINING[stage], how) as hanging:
        trainer = Trainer(target, "us", 0, pause_s=0.02, policy=replace(POLICY, lease_term_s=Policy().lease_term_s))
        trainer.until_merged(2)
        hanging.is_armed = True
        hanging.until(lambda: True)
        before = trainer.learner.stats.deltas_acknowledged
        waited_s = hanging.until(lambda: trainer.learner.stats.deltas_acknowledged > before + 1)
        trainer.stop()
    print(f"{stage}, {how}: {waited_s:.1f} s to the next acknowledgement but one")
    assert waited_s < HANG_S


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.parametrize("method", JOINING)
def test_a_replica_that_hangs_delays_a_learner_that_joins_by_seconds(replicas: TwoReplicas, method: str) -> None:
    with staged(replicas, replicas.target, Stage(method, sent_count=0), "stopped") as hanging:
        hanging.is_armed = True
        with ArrayLearner(
            Quadratic().arrays, target=replicas.target, run="fit", learner_id="us", create=True, policy=POLICY
        ) as learner:
            waited_s = hanging.until(lambda: learner.stats.is_attached)
    print(f"{method}: {waited_s:.1f} s")
    assert waited_s < HANG_S


@pytest.mark.timeout(180)
@pytest.mark.parametrize("how", ["stopped", pytest.param("stuck", marks=pytest.mark.long)])
def test_an_idle_learner_attaches_to_another_replica_when_its_own_hangs(replicas: TwoReplicas, how: str) -> None:
    with staged(replicas, replicas.target, Stage("Attach", received_count=1), how) as hanging:
        hanging.is_armed = True
        with ArrayLearner(
            Quadratic().arrays, target=replicas.target, run="fit", learner_id="us", create=True, policy=POLICY
        ) as learner:
            hanging.until(lambda: not learner.stats.is_attached)
            waited_s = hanging.until(lambda: learner.stats.is_attached)
    assert waited_s < HANG_S


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_learner_with_one_target_waits_while_that_hangs_and_takes_a_fresh_connection_that_answers(
    replicas: TwoReplicas,
) -> None:
    trainer = Trainer(replicas.relayed.split(",")[0], "us", 0, pause_s=0.02)
    try:
        trainer.until_merged(2)
        replicas.hang(0, "stopped")
        time.sleep(HANG_S)
        replicas.go_on(0)
        trainer.until_merged(2)
        assert trainer.longest_detached_s < 1.0
        assert trainer.learner.stats.problem is None
        replicas.hang(0, "half-open")
        begun_s = time.monotonic()
        trainer.until_merged(3)
        assert time.monotonic() - begun_s < HANG_S
    finally:
        trainer.stop()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_slow_link_is_not_taken_for_a_replica_that_hangs(replicas: TwoReplicas) -> None:
    weights = {"weight": np.random.default_rng(0).normal(size=60_000).astype(np.float32)}
    for link in replicas.links:
        link.slow_down(bytes_per_s=30_000, delay_s=0.05)
    with heard_logs() as logs, RunsClient(replicas.relayed) as client:
        client.create_run("fit", weights)
        pulled = dict(client.pull("fit"))
    np.testing.assert_array_equal(pulled["weight"], weights["weight"])
    assert [line["event"] for line in logs if "hangs" in line["event"]] == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("is_another", [False, True])
def test_a_learner_whose_run_vanishes_says_so_and_goes_on_when_it_is_back(tmp_path: Path, *, is_another: bool) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    thread, process = LoopThread("replica"), ServeProcess(store.as_uri(), tmp_path)
    thread.run(process.start())
    target = f"127.0.0.1:{process.port}"
    trainer = Trainer(target, "us", 0, pause_s=0.02)

    def until(holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline_s, trainer.learner.stats
            time.sleep(0.02)

    try:
        with heard_logs() as logs:
            trainer.until_merged(2)
            thread.run(process.kill())
            store.rename(away)
            thread.run(process.start())
            until(lambda: _reason(trainer.learner.stats.problem) == "RUN_NOT_FOUND")
            assert "store is mounted" in str(trainer.learner.stats.problem)
            step_count = trainer.learner.stats.step_count
            until(lambda: trainer.learner.stats.step_count > step_count + 200)
            assert not trainer.learner.stats.is_attached
            assert _reason(trainer.learner.failure) == ""
            if is_another:
                with RunsClient(target) as client:
                    client.create_run("fit", trainer.learner.merged_weights())
                until(lambda: _reason(trainer.learner.failure) == "RUN_REPLACED")
                return
            thread.run(process.kill())
            shutil.rmtree(store)
            away.rename(store)
            thread.run(process.start())
            trainer.until_merged(3)
            assert trainer.learner.stats.problem is None
        said = [line for line in logs if line.get("reason") == "RUN_NOT_FOUND"]
        assert len([line for line in said if "will be tried again" in line["event"]]) == 1
        trainer.stop()
        with RunsClient(target) as client:
            run = client.close_run("fit")
        check_fates(asyncio.run(final_state(process.store_url, "fit", run.uid)), set())
    finally:
        trainer.give_up()
        thread.run(process.stop())
        thread.close()


def _reason(error: SkerryError | None) -> str:
    return error.reason if error is not None else ""


_ASKER = """
import sys
from skerry import RunsClient
with RunsClient(sys.argv[1], tls="insecure") as client:
    for _ in sys.stdin:
        print(*(run.name for run in client.list_runs()), flush=True)
"""


@pytest.mark.timeout(120)
def test_of_a_name_with_several_addresses_any_that_lives_is_called(tmp_path: Path) -> None:
    """The name is in a hosts file that one process sees, in a mount namespace of its own."""
    (tmp_path / "hosts").write_text("127.0.0.2 syncer.test\n127.0.0.3 syncer.test\n")
    in_namespace = ["unshare", "--mount", "sh", "-c", f'mount --bind {tmp_path}/hosts /etc/hosts && exec "$@"', "sh"]
    if subprocess.run([*in_namespace, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs root to give a name several addresses")
    thread = LoopThread("replicas")
    first = ServeProcess((tmp_path / "store").as_uri(), tmp_path, "127.0.0.2")
    thread.run(first.start())
    second = ServeProcess(first.store_url, tmp_path, "127.0.0.3", first.port)
    thread.run(second.start())
    asker = subprocess.Popen(
        [*in_namespace, sys.executable, "-c", _ASKER, f"syncer.test:{first.port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert asker.stdin is not None
    assert asker.stdout is not None
    try:
        with RunsClient(f"127.0.0.2:{first.port}") as client:
            client.create_run("fit", {"bias": np.zeros(4, np.float32)})
        for dead, is_killed in ((None, False), (first, True), (second, True), (first, False)):
            if dead is not None and is_killed:
                thread.run(dead.kill())
            elif dead is not None:
                dead.stop_running()
            for _ in range(4):
                asked_at_s = time.monotonic()
                print(file=asker.stdin, flush=True)
                assert asker.stdout.readline() == "fit\n"
                assert dead is None or time.monotonic() - asked_at_s < (FAIL_OVER_S if is_killed else HANG_S)
            if dead is not None and is_killed:
                thread.run(dead.start())
                time.sleep(RECONNECT_S)
    finally:
        asker.stdin.close()
        asker.wait(20)
        for process in (first, second):
            thread.run(process.stop())
        thread.close()


def test_calls_are_spread_over_the_healthy_replicas_and_a_draining_one_gets_none(replicas: TwoReplicas) -> None:
    async def spread() -> None:
        transport = GrpcTransport(replicas.target)
        targets = dict(zip(transport._replicas, replicas.target.split(","), strict=True))

        async def until(wanted: set[str]) -> None:
            """Returns once exactly the wanted ones answer; no call may fail."""
            found: set[str] = set()
            async with asyncio.timeout(20):
                while found != wanted:
                    asked = [await transport._replicas.next() for _ in range(6)]
                    await asyncio.gather(*(one.capabilities.GetCapabilities(ASK, timeout=5) for one in asked))
                    found = {targets[one.replica] for one in asked}

        await until(set(targets.values()))
        await asyncio.wrap_future(replicas.thread.start(_terminated(replicas.processes[0])))
        await until({replicas.target.split(",")[1]})
        await transport.close()

    asyncio.run(spread())


async def _terminated(process: ServeProcess) -> None:
    process.terminate()
    assert await process.exit_status() == 0


def test_without_any_replica_the_error_names_the_trouble() -> None:
    with RunsClient("127.0.0.1:1,127.0.0.1:2") as client, pytest.raises(SkerryError) as caught:
        client.list_runs()
    assert caught.value.reason == "UNREACHABLE"


def test_no_proxy_of_the_environment_is_used_for_this_machine(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    for name in (target, target.replace("127.0.0.1", "localhost")):
        with RunsClient(name) as client:
            assert client.list_runs() == []
