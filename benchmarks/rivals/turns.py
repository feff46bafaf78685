"""Runs the systems in turns, inside a network of the benchmark's own, and collects what each synchronisation took."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import Process, all_hear, others_cpu_s, wait_idle
from benchmarks.rivals.contenders import Contender
from benchmarks.rivals.peers.model import STEP_SIZE

LEARNERS: Final = 2
LINKS: Final = {"loopback": math.inf, "1gbit": 1e9}  # bits a second, of all that the interface carries
_START_S: Final = 120.0
_LONGEST_S: Final = 180.0
_IDLE_S: Final = 6.0
# Learners that did not synchronise differ by 1.4 steps. Skerry's 4 bits leave 0.2, which error feedback sends later,
# and hivemind's 8 bits of the weights themselves 0.39.
_AGREEMENT: Final = 0.5


@dataclass
class Found:
    """What the synchronisations of one system on one link took; one number each a synchronisation."""

    wall_s: list[float] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def _sent_bytes() -> int:
    """Returns the bytes that the loopback interface has sent so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    raise ValueError("there is no loopback interface")


def limit_loopback(link: str) -> None:
    """Limits what the loopback interface carries in all, both directions together."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
    if not math.isinf(LINKS[link]):
        words = f"tc qdisc add dev lo root tbf rate {LINKS[link]:.0f}bit burst 256kb limit 16mb"
        subprocess.run(words.split(), check=True)


class Visit:
    """One system's processes, from start to end: a server and learners."""

    def __init__(self, contender: Contender, python: str, folder: Path) -> None:
        """Starts them."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._common = [python, "-B", "-m", contender.module, "--folder", str(folder)]
        self._folder = folder
        self._is_polling = contender.is_polling
        self._server: Process | None = None
        self._learners: list[Process] = []

    def begin(self) -> None:
        """Returns when the learners are ready and have synchronised once.

        Raises:
            RuntimeError: the system does not work here; the message has the end of a log.
            TimeoutError: likewise, it is too slow.
        """
        self._server = Process([*self._common, "--serve"], self._folder / "server.log")
        target = self._server.hear(_START_S)["target"]
        for number in range(LEARNERS):
            own = ["--number", str(number), "--learners", str(LEARNERS), "--target", target]
            self._learners.append(Process([*self._common, *own], self._folder / f"learner-{number}.log"))
        for learner in self._learners:
            learner.hear(_START_S)
        self.synchronise(Found(), is_first=True)

    def synchronise(self, found: Found, *, is_first: bool = False) -> None:
        """Measures one synchronisation; the first, in which learners may get the weights of one of them, unchecked.

        Raises:
            RuntimeError: a process has ended, or the learners do not agree afterwards.
            TimeoutError: it did not end.
        """
        before = all_hear(self._learners, _LONGEST_S, do="prepare")
        wait_idle(_IDLE_S)
        begin_bytes, begin_cpu_s = _sent_bytes(), others_cpu_s()
        answers = all_hear(self._learners, _LONGEST_S, do="synchronise")
        wall_s = max(one["end_s"] for one in answers) - min(one["begin_s"] for one in answers)
        if not self._is_polling:
            wait_idle(_IDLE_S)
        end_bytes, end_cpu_s = _sent_bytes(), others_cpu_s()
        if not is_first:
            check(before, answers)
        found.wall_s.append(wall_s)
        found.sent_bytes.append(end_bytes - begin_bytes)
        found.cpu_s.append(end_cpu_s - begin_cpu_s)

    def end(self) -> None:
        """Kills all processes, and removes their files."""
        for process in (*self._learners, *filter(None, [self._server])):
            process.end()
        shutil.rmtree(self._folder, ignore_errors=True)


def check(before: Sequence[Any], after: Sequence[Any]) -> None:
    """Checks that the learners' weights changed, and are about the same now.

    Raises:
        RuntimeError: nothing was exchanged; such a run is no result.
    """
    apart = _distance(after[0]["sample"], after[1]["sample"]) / STEP_SIZE
    moved = min(_distance(one["sample"], other["sample"]) for one, other in zip(before, after, strict=True)) / STEP_SIZE
    if not (apart <= _AGREEMENT and moved > _AGREEMENT):
        raise RuntimeError(f"the learners did not synchronise. steps_apart={apart:.3g}, steps_moved={moved:.3g}")


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean((one - other) ** 2 for one, other in zip(left, right, strict=True)))


def measure(
    contenders: Sequence[tuple[Contender, str]],
    links: Sequence[str],
    folder: Path,
    *,
    visits: int,
    samples: int,
    longest_s: float,
    say: Callable[[str], None],
) -> tuple[dict[tuple[str, str], Found], dict[str, str]]:
    """Visits each system so many times in turns, for so many synchronisations a link.

    Returns what was found by name and link, and by name why a system gave no result; that one is not visited again.
    After `longest_s` no turn begins.
    """
    found = {(contender.name, link): Found() for contender, _ in contenders for link in links}
    failed: dict[str, str] = {}
    deadline_s = time.monotonic() + longest_s
    for number in range(visits):
        for contender, python in contenders:
            if contender.name in failed or time.monotonic() > deadline_s:
                continue
            visit = Visit(contender, python, folder / contender.name)
            try:
                limit_loopback("loopback")
                visit.begin()
                for link in links:
                    limit_loopback(link)
                    one = found[contender.name, link]
                    for _ in range(samples):
                        visit.synchronise(one)
                    seconds = ", ".join(f"{value:.2f}" for value in one.wall_s[-samples:])
                    say(f"visit {number + 1} of {visits}: {contender.name} on {link}: {seconds} s")
            except (RuntimeError, TimeoutError, OSError) as error:
                failed[contender.name] = str(error)
                say(f"visit {number + 1} of {visits}: {contender.name} failed. {error}")
            finally:
                visit.end()
    return found, failed
