"""The cases: what is started where, what is told to it, and the rows that come out."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import Process, Served, all_hear, this_python, wait_idle
from benchmarks.report import Row, measured
from benchmarks.wan import trainer
from benchmarks.wan.network import Network
from skerry.planning.figures import measured as measured_figures
from skerry.planning.plan import HOURS, Prices, Setting, plan
from skerry.planning.plan import Site as PlannedSite
from skerry.wire.codecs import Codec
from skerry.wire.policy import Policy

GIGABIT: Final = 1e9
_LONGEST_S: Final = 180.0
PORT: Final = 50_051
_IDLE_S: Final = 20.0
_RECEIVE_BUFFER: Final = "4096 1048576 6291456"  # as in compose.yaml


class Site:
    """The network, and the processes of one case in it; `clear` ends them."""

    def __init__(self, folder: Path, say: Callable[[str], None], *, is_short: bool) -> None:
        self.network = Network()
        self.say = say
        self.is_short = is_short
        self.folder = folder
        self._addresses = {name: self.network.add(name) for name in ("syncer", "one", "two", "three")}
        self._processes: list[Process] = []
        self._count = 0
        self.store = folder  # of the syncer that was started last

    @property
    def target(self) -> str:
        """Where learners find the syncer, or each other."""
        return f"{self._addresses['syncer']}:{PORT}"

    def address(self, node: str) -> str:
        """Returns a node's address."""
        return self._addresses[node]

    def limit(self, bits_per_s: float, *, round_trip_s: float = 0.0) -> None:
        """Limits the links of all nodes, and sets the round trip between any two."""
        self.network.relay.round_trip_s = round_trip_s
        for name in self._addresses:
            self.network.limit(name, bits_per_s)

    def start(self, node: str, module: str, *arguments: str) -> Process:
        """Starts a module on a node."""
        self._count += 1
        command = this_python(module, *arguments)
        process = Process(command, self.folder / f"{self._count}-{module}.log", node=node)
        self._processes.append(process)
        return process

    def serve(self) -> None:
        """Starts `skerry serve` on the syncer's node with a new durable store, and returns when it listens."""
        self._count += 1
        folder = self.folder / f"{self._count}-serve"
        folder.mkdir()
        served = Served(folder, "--insecure", listen=f"0.0.0.0:{PORT}", node="syncer")
        self.store = served.store
        self._processes.append(served)

    def clear(self) -> None:
        """Kills what the case started."""
        for process in self._processes:
            process.end()
        self._processes.clear()


def long_link(site: Site) -> Iterator[Row]:
    """2 Gbit/s with a round trip of 100 ms: encoded parts that go up, snapshots that come down.

    First as the kernel is, and then with the buffers that compose.yaml gives its containers.
    """
    numel, samples = (12_582_912, 2) if site.is_short else (50_331_648, 5)
    site.limit(2 * GIGABIT, round_trip_s=0.1)
    case = f"2 Gbit/s, 100 ms round trip, {numel * 4 / 1e6:.0f} MB of float32, {site.network.congestion_control()}"
    yield from _transfers(site, case, numel, samples)
    site.clear()
    with site.network.receive_buffer(_RECEIVE_BUFFER):
        yield from _transfers(site, f"{case}, tcp_rmem of compose.yaml", numel, samples)


def _transfers(site: Site, case: str, numel: int, samples: int) -> Iterator[Row]:
    site.serve()
    one = site.start("one", "benchmarks.wan.bulk", "--target", site.target, "--name", "one", "--numel", str(numel))
    one.hear(_LONGEST_S)
    joining = ["--target", site.target, "--numel", str(numel)]
    pushes, pulls = [], []
    for sample in range(samples + 1):
        wait_idle(_IDLE_S)
        pushes.append(all_hear([one], _LONGEST_S, do="push")[0])
        wait_idle(_IDLE_S)
        joiner = site.start("two", "benchmarks.wan.bulk", *joining, "--name", f"two-{sample}")
        pulls.append(joiner.hear(_LONGEST_S))
        joiner.end()
        site.say(f"long link: push {pushes[-1]['wall_s']:.2f} s, pull {pulls[-1]['wall_s']:.2f} s")
    named = {
        "push of encoded parts, acknowledged durable": pushes,
        "pull of a snapshot, by a process that has just started": pulls,
    }
    for name, answers in named.items():  # the first of each warms up
        speeds = [8 * one["size_bytes"] / one["wall_s"] / GIGABIT for one in answers[1:]]
        yield measured(case, name, speeds, "Gbit/s", limit=2.0)


def _islands(site: Site, steps_s: dict[str, float]) -> list[Process]:
    """Starts an island on each node, with its time of a step, and returns when all have joined."""
    common = ["--how", "island", "--target", site.target]
    learners = [
        site.start(node, "benchmarks.wan.trainer", *common, "--step-s", str(step_s), "--number", str(number))
        for number, (node, step_s) in enumerate(steps_s.items())
    ]
    for learner in learners:
        learner.hear(_LONGEST_S)
    return learners


def thin_link(site: Site) -> Iterator[Row]:
    """A link on which data-parallel training communicates 97 % of its time: islands beside it, in turns."""
    step_s, share, turns = 0.1, 0.97, 1 if site.is_short else 5
    # A ring of two sends every gradient once each way.
    bits_per_s = 32 * trainer.NUMEL / (step_s * share / (1 - share))
    seconds = 20.0 if site.is_short else 40.0
    found: dict[str, list[list[Any]]] = {"data-parallel": [], "island": []}
    for turn in range(turns):
        for how, answers in found.items():
            site.limit(bits_per_s if how == "data-parallel" else GIGABIT, round_trip_s=0.04)
            if how == "island":
                site.serve()
                learners = _islands(site, {"one": step_s, "two": step_s})
                site.limit(bits_per_s, round_trip_s=0.04)
            else:
                learners = _data_parallel(site, step_s)
            answers.append(all_hear(learners, seconds + _LONGEST_S, seconds=seconds))
            site.clear()
            if how == "island" and not all(one["merged"] for one in answers[-1]):
                raise RuntimeError("nothing was merged, so the islands' speed is no result")
            speed = _tokens_per_s(answers[-1])
            site.say(f"thin link, turn {turn + 1} of {turns}: {how} trains on {speed:.1f} samples a second")
    case = f"{bits_per_s / 1e6:.1f} Mbit/s, 40 ms round trip, {trainer.NUMEL / 1e6:.1f}M parameters, steps of 0.1 s"
    parallel, islands = ([_tokens_per_s(one) for one in answers] for answers in found.values())
    busy, utilised = ([_utilisation(one) for one in answers] for answers in found.values())
    yield measured(case, "data-parallel: share of time spent communicating", [1 - one for one in busy], "")
    yield measured(case, "data-parallel: samples a second, both", parallel, "/s")
    yield measured(case, "islands: samples a second, both", islands, "/s", limit=statistics.median(parallel))
    yield measured(case, "islands: compute utilisation", utilised, "", limit=1.0)
    yield measured(
        case, "islands: deltas merged, both", [sum(one["merged"] for one in two) for two in found["island"]], ""
    )
    for how, answers in found.items():
        yield measured(case, f"{how}: loss at the end", [one["loss"] for two in answers for one in two], "")


def planned(site: Site) -> Iterator[Row]:
    """What `skerry plan` says of a run of two unequal learners, as the limit, and what the run then takes."""
    steps_s, bits_per_s = {"one": 0.1, "two": 0.15}, 1e8
    rounds = 10 if site.is_short else 20  # a snapshot of every fragment in ten rounds
    site.limit(bits_per_s, round_trip_s=0.04)
    site.serve()
    learners = _islands(site, steps_s)
    round_s = trainer.H * min(steps_s.values())
    begin = all_hear(learners, _LONGEST_S, seconds=3 * round_s)
    before = _store_use(site.store)
    answers = all_hear(learners, _LONGEST_S, seconds=rounds * round_s)
    took = {name: value - before[name] for name, value in _store_use(site.store).items()}
    fragment_count = len(trainer.SHAPES)
    setting = Setting(trainer.H, fragment_count, Codec.INT4)
    sites = [PlannedSite(name, step_s, bits_per_s) for name, step_s in steps_s.items()]
    figures, syncer = measured_figures(Codec.INT4), PlannedSite("syncer")
    wanted = plan(trainer.NUMEL, sites, setting, figures, syncer=syncer, prices=Prices(), policy=Policy())
    case = f"{trainer.NUMEL / 1e6:.1f}M parameters, {setting}, steps of 0.1 and 0.15 s; the limit is the plan"
    for learner, answer, old in zip(wanted.learners, answers, begin, strict=True):
        for way, limit in (("up", learner.up_bits_per_step), ("down", learner.down_bits_per_step)):
            bits = 8 * (answer[f"bytes_{way}"] - old[f"bytes_{way}"]) / len(answer["ends_s"])
            yield measured(case, f"{learner.name}: bits a step, {way}", [bits], "bit", limit=limit)
        yield measured(case, f"{learner.name}: utilisation", [_utilisation([answer])], "", limit=learner.utilisation)
    seconds = statistics.fmean(answer["ends_s"][-1] - answer["begin_s"] for answer in answers)
    interval_s = fragment_count * seconds / took["updates"]
    yield measured(case, "time between versions", [interval_s], "s", limit=wanted.version_interval_s)
    months = seconds / (3600 * HOURS)
    written = took["bytes"] / months / 1e12
    yield measured(case, "written to the store a month", [written], "TB", limit=wanted.written_bytes_per_month / 1e12)
    puts = took["objects"] / months / 1e6
    yield measured(case, "requests that write a month", [puts], "million", limit=wanted.puts_per_month / 1e6)


def _store_use(store: Path) -> dict[str, int]:
    """Returns the objects of the runs, those of them that are updates, and the bytes of all; nothing is deleted yet."""
    sizes = {path: path.stat().st_size for path in store.glob("runs/**/*") if path.is_file()}
    updates = sum("updates" in path.parts for path in sizes)
    return {"objects": len(sizes), "updates": updates, "bytes": sum(sizes.values())}


def _data_parallel(site: Site, step_s: float) -> list[Process]:
    target = f"{site.address('one')}:{PORT}"
    common = ["--how", "data-parallel", "--target", target, "--step-s", str(step_s)]
    learners = [
        site.start(node, "benchmarks.wan.trainer", *common, "--number", str(number))
        for number, node in enumerate(("one", "two"))
    ]
    for learner in learners:
        learner.hear(_LONGEST_S)
    return learners


def _tokens_per_s(answers: list[Any]) -> float:
    return math.fsum(trainer.BATCH * len(one["ends_s"]) / (one["ends_s"][-1] - one["begin_s"]) for one in answers)


def _utilisation(answers: list[Any]) -> float:
    """Returns the share of the time in which the learners computed, not counting what exceeds a step's own time."""
    return statistics.fmean(
        len(one["ends_s"]) * statistics.median(one["computing_s"]) / (one["ends_s"][-1] - one["begin_s"])
        for one in answers
    )


CASES: Final = {"long-link": long_link, "thin-link": thin_link, "planned": planned}


def measure(name: str, site: Site) -> list[Row]:
    """Runs one case, and ends what it started."""
    with contextlib.ExitStack() as stack:
        stack.callback(site.clear)
        return list(CASES[name](site))
