"""Trains one model on three learners while one of them and the syncer are killed: `python -m examples.demo`.

Three `skerry learn` processes, one of them three times slower, train through a `skerry serve` process. After a third of
the steps a learner is killed with SIGKILL and comes back; after two thirds the syncer is killed, and comes back from
its store. Meanwhile `skerry judge` evaluates the merged model, `skerry report` follows the run, and, to compare with, a
single learner takes as many steps as a fast one.

It leaves report.html and demo.png in --out, and exits with 1 if the merged model is no better than the single
learner's, if a version can't be recomputed from its deltas, or if an acknowledged delta has no fate.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

import matplotlib as mpl
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from skerry import RunsClient
from skerry.history.run_history import RunHistory
from skerry.history.series import Point
from skerry_learner.settings import MODEL_CONFIGS

mpl.use("Agg")

import matplotlib.pyplot as plt

RUN: Final = "demo"
MODEL: Final = "tiny"
BATCH_SIZE: Final = 8
INNER_STEP_COUNT: Final = 16
SLOWDOWNS: Final = {"us-east": 1.0, "eu-west": 1.0, "ap-south": 3.0}
TIMEKEEPER: Final = "us-east"  # its steps decide when things happen; it is fast and is never killed
KILLED: Final = "eu-west"
COLOURS: Final = {"us-east": "#1c7ed6", "eu-west": "#0ca678", "ap-south": "#f08c00", "syncer": "#fa5252"}
MERGED_COLOUR: Final = "#c2255c"
EVALUATION: Final = ("--batch", str(BATCH_SIZE), "--eval-windows", "128", "--device", "cpu")
TIMEOUT_S: Final = 120.0


class DemoError(Exception):
    """A process failed, ended too early or did not end in time; the message has the end of its log."""


class Metrics:
    """The metrics lines that one learner has written so far; a restarted learner goes on in the same file."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._path = folder / "metrics.jsonl"
        self._offset = 0

    def poll(self) -> None:
        """Reads the whole lines that were added."""
        if self._path.exists():
            content = self._path.read_bytes()[self._offset :]
            whole = content[: content.rfind(b"\n") + 1]
            self._offset += len(whole)
            self.lines += [json.loads(text) for text in whole.splitlines()]

    @property
    def step(self) -> int:
        """The newest step, 0 before the first."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The lines with a loss on held-out text."""
        return [line for line in self.lines if line["val_loss"] is not None]

    @property
    def acknowledged_count(self) -> int:
        """Deltas that were acknowledged, by the last line of each process."""
        return sum({line["attempt"]: line["deltas_acknowledged"] for line in self.lines}.values())


class Processes:
    """`skerry` commands as child processes, each with a log; leaving the context kills those that still run."""

    def __init__(self, folder: Path) -> None:
        self._logs = folder / "logs"
        # Variables that begin with SKERRY_ may be meant for another run. One thread a learner: all share few cores.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
        self._environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        """Starts `skerry ARGUMENTS`; its output is appended to logs/NAME.log."""
        self._logs.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "skerry.cli", *arguments]
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def kill(self, name: str) -> None:
        """Ends a process with SIGKILL."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> None:
        """Asks a process to end, and waits until it has."""
        self._running[name].send_signal(signal.SIGTERM)
        self.wait(name)

    def check(self) -> None:
        """Raises DemoError if a process has failed."""
        for name, process in self._running.items():
            if process.poll():
                raise self._error(name, f"ended with status {process.returncode}")

    def wait(self, name: str, *, accepted: Sequence[int] = (0,)) -> int:
        """Returns a process's exit status; raises DemoError if it is not one of those accepted, or takes too long."""
        try:
            status = self._running[name].wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise self._error(name, f"did not end within {TIMEOUT_S:.0f} s") from None
        if status not in accepted:
            raise self._error(name, f"ended with status {status}")
        del self._running[name]
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._running):
            self.kill(name)

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def _error(self, name: str, problem: str) -> DemoError:
        end = self._log(name).read_text(errors="replace").splitlines()[-15:]
        return DemoError("\n".join([f"{name} {problem}", f"log={self._log(name)}", *end]))


class Demo:
    """One course of the demo: what is started, killed and restarted at which step, and when it happened."""

    def __init__(self, folder: Path, step_count: int, processes: Processes, progress: Progress) -> None:
        self.metrics = {name: Metrics(folder / "learners" / name) for name in ("single", *SLOWDOWNS)}
        self.moments_unix_s: dict[str, float] = {}
        self.history = RunHistory()
        self._folder = folder
        self._step_count = step_count
        self._processes = processes
        self._progress = progress
        self._bars = {name: progress.add_task(name, total=step_count) for name in self.metrics}
        self._listen = "127.0.0.1:0"

    def run(self) -> dict[str, bool]:
        """Trains three learners through both outages beside a single one, and closes the run; returns its checks."""
        for name in ("store", "learners", "logs"):  # the folder may hold other files
            shutil.rmtree(self._folder / name, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)
        policy = {"inner_step_count": INNER_STEP_COUNT, "lease_term_s": 5.0, "planned_token_count": self._token_count}
        (self._folder / "policy.json").write_text(json.dumps(policy))
        self._say("three learners, and a single one to compare with")
        self._serve()
        for name in SLOWDOWNS:
            self._join(name)
        self._processes.start("single", *self._learn("single", self._step_count), "--alone")
        self._processes.start("judge", "judge", RUN, "--target", self._listen, "--every", "8", *EVALUATION)
        report = str(self._folder / "report.html")
        self._processes.start("report", "report", RUN, "--target", self._listen, "--follow", "--out", report)
        self._look_until(lambda: all(self.metrics[name].lines for name in SLOWDOWNS))
        self.moments_unix_s["started"] = min(self.metrics[name].lines[0]["unix_s"] for name in SLOWDOWNS)
        self._kill_and_restart(KILLED, self._step_count // 3, self._step_count // 2)
        # H steps without a syncer: every fragment misses a contribution.
        syncer_step = self._step_count * 2 // 3
        self._kill_and_restart("syncer", syncer_step, syncer_step + INNER_STEP_COUNT)
        self._look_until(lambda: self.metrics[TIMEKEEPER].step >= self._step_count)
        with RunsClient(self._listen) as client:
            client.close_run(RUN)
            for name in (*SLOWDOWNS, "judge", "report"):  # which end when they hear that the run is closed
                self._processes.wait(name)
            self._look_until(lambda: self.metrics["single"].step >= self._step_count)
            self._processes.wait("single")
            self._look()
            for message in client.watch(RUN, after_position=1):
                self.history.apply(message)
                if self.history.is_current:
                    break
        self._processes.stop("syncer")
        self._say("recomputing every version from its deltas")
        self._processes.start("verify", "verify", RUN, "--store", self._store_url)
        return {
            "learning together helps": self.merged[-1].value < self.single_loss,
            "every version can be recomputed from its deltas": self._processes.wait("verify", accepted=(0, 1)) == 0,
            "every acknowledged delta has its fate": all(map(self._has_fates, SLOWDOWNS)),
        }

    @property
    def single_loss(self) -> float:
        """The single learner's last loss on held-out text."""
        return float(self.metrics["single"].evaluations[-1]["val_loss"])

    @property
    def merged(self) -> list[Point]:
        """What the judge said of the merged model."""
        return list(self.history.metrics["judge", "held_out_loss"])

    @property
    def _store_url(self) -> str:
        return f"file://{self._folder / 'store'}"

    @property
    def _token_count(self) -> int:
        """About how many tokens all learners train until the run is closed."""
        step_count = sum(self._step_count / slowdown for slowdown in SLOWDOWNS.values())
        step_count -= self._step_count // 2 - self._step_count // 3  # while one is dead
        return round(step_count) * BATCH_SIZE * MODEL_CONFIGS[MODEL].context

    def _has_fates(self, name: str) -> bool:
        counted = self.metrics[name].acknowledged_count
        decided = sum(fate.delta_count for fate in self.history.learners[name].status.fates)
        # The last acknowledgements of a killed learner may not have reached its metrics.
        return counted <= decided if name == KILLED else counted == decided

    def _kill_and_restart(self, name: str, killed_at_step: int, back_at_step: int) -> None:
        timekeeper = self.metrics[TIMEKEEPER]
        self._look_until(lambda: timekeeper.step >= killed_at_step)
        self._processes.kill(name)
        self.moments_unix_s[f"{name} killed"] = time.time()
        self._say(f"{name} is killed")
        self._look_until(lambda: timekeeper.step >= back_at_step)
        if name == "syncer":
            self._serve()
        else:
            line_count = len(self.metrics[name].lines)
            self._join(name)
            self._look_until(lambda: len(self.metrics[name].lines) > line_count)
        self.moments_unix_s[f"{name} back"] = time.time()
        self._say(f"{name} is back")

    def _serve(self) -> None:
        port_file = self._folder / "syncer-port"
        port_file.unlink(missing_ok=True)
        arguments = ("--new-store", "--store", self._store_url, "--listen", self._listen, "--port-file", str(port_file))
        self._processes.start("syncer", "serve", *arguments)
        self._look_until(lambda: port_file.exists() and bool(port_file.read_text().strip()))
        self._listen = f"127.0.0.1:{port_file.read_text().strip()}"

    def _join(self, name: str) -> None:
        # It trains until it hears that the run is closed.
        arguments = self._learn(name, 1_000_000)
        policy = ("--policy", str(self._folder / "policy.json"), "--slowdown", str(SLOWDOWNS[name]))
        self._processes.start(name, *arguments, RUN, "--target", self._listen, "--region", name[:2], *policy)

    def _learn(self, name: str, step_count: int) -> list[str]:
        # The single learner reads all of the data, so that its shard is no handicap.
        shard = f"{list(SLOWDOWNS).index(name) + 1}/{len(SLOWDOWNS)}" if name in SLOWDOWNS else "1/1"
        return [
            *(
                "learn",
                "--model",
                MODEL,
                *EVALUATION,
                "--learner-id",
                name,
                "--shard",
                shard,
                "--seed",
                "0",
                "--threads",
                "1",
            ),
            *("--steps", str(step_count), "--horizon", str(self._step_count), "--learning-rate", "3e-3"),
            *("--warmup", "50", "--checkpoint-every", "50"),
            *("--eval-every", str(round(40 / SLOWDOWNS.get(name, 1.0)))),
            *("--work-dir", str(self._folder / "learners" / name)),
        ]

    def _look_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self._look()
            self._processes.check()

    def _look(self) -> None:
        for name, metrics in self.metrics.items():
            metrics.poll()
            loss = f", loss {metrics.evaluations[-1]['val_loss']:.3f}" if metrics.evaluations else ""
            self._progress.update(self._bars[name], completed=metrics.step, description=f"{name}{loss}")
        time.sleep(0.05)

    def _say(self, phase: str) -> None:
        self._progress.console.print(f"step {self.metrics[TIMEKEEPER].step}: {phase}", highlight=False)


def draw(demo: Demo, path: Path) -> None:
    """Draws the losses, and what was sent when, with both outages."""
    start_s = demo.moments_unix_s["started"]
    plt.rcParams.update({"font.size": 18, "axes.spines.top": False, "axes.spines.right": False})
    plt.rcParams.update({"figure.constrained_layout.w_pad": 0.15, "figure.constrained_layout.h_pad": 0.15})
    figure, (losses, exchange) = plt.subplots(
        2, 1, figsize=(16, 9), dpi=120, sharex=True, height_ratios=(5, 2), layout="constrained"
    )
    for name, slowdown in SLOWDOWNS.items():
        curve = [(line["unix_s"] - start_s, line["val_loss"]) for line in demo.metrics[name].evaluations]
        label = name if slowdown == 1 else f"{name}, {slowdown:.0f}x slower"
        losses.plot(*zip(*curve, strict=True), color=COLOURS[name], lw=2, label=label)
    # The single learner's losses stand where the timekeeper has taken as many steps.
    times_s = {line["step"]: line["unix_s"] - start_s for line in demo.metrics[TIMEKEEPER].lines}
    curve = [(times_s[line["step"]], line["val_loss"]) for line in demo.metrics["single"].evaluations]
    losses.plot(*zip(*curve, strict=True), color="#5c6773", lw=3, ls="--", label="a single learner, as many steps")
    curve = [(point.time_s - start_s, point.value) for point in demo.merged]
    losses.plot(*zip(*curve, strict=True), color=MERGED_COLOUR, lw=5, label="the merged model")
    # The untrained model's loss is far above.
    highest = max(demo.metrics[name].evaluations[0]["val_loss"] for name in SLOWDOWNS)
    losses.set_ylim(min(demo.merged[-1].value, demo.single_loss) - 0.1, highest + 0.3)
    losses.set_ylabel("nats a byte")
    losses.legend(frameon=False)
    versions = [version for version in demo.history.versions if version.version > 0]
    rows = [("versions", MERGED_COLOUR, [version.committed_at_s for version in versions])]
    for name in reversed(SLOWDOWNS):
        deltas = [(version, delta) for version in versions for delta in version.deltas if delta.learner_id == name]
        moments_s = [version.came_at_s.get(delta.delta_id, 0.0) for version, delta in deltas]
        rows.append((name, COLOURS[name], [moment_s for moment_s in moments_s if moment_s]))
    for height, (_, colour, moments_s) in enumerate(rows):
        offsets_s = [moment_s - start_s for moment_s in moments_s]
        exchange.eventplot(offsets_s, lineoffsets=height, linelengths=0.7, linewidths=2, colors=colour)
    exchange.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    exchange.set_title("Deltas of each learner, and versions that are made of them", fontsize=18, loc="left")
    exchange.set_xlabel("seconds")
    for name in (KILLED, "syncer"):
        first_s, last_s = (demo.moments_unix_s[f"{name} {moment}"] - start_s for moment in ("killed", "back"))
        for axes in (losses, exchange):
            axes.axvspan(first_s, last_s, color=COLOURS[name], alpha=0.15, lw=0)
        losses.text(first_s, losses.get_ylim()[1], f" {name}\n killed", color=COLOURS[name], va="top", weight="bold")
    figure.suptitle("A learner is killed, the syncer is killed, and training goes on", fontsize=30, weight="bold")
    result = f"{demo.merged[-1].value:.2f} for the merged model, {demo.single_loss:.2f} for a single learner"
    losses.set_title(f"Loss on held-out text: {result}", fontsize=22)
    figure.savefig(path, facecolor="white")


def main() -> int:
    """Runs the demo and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build", "demo"), help="folder for everything it makes")
    parser.add_argument("--steps", type=int, default=450, help="training steps of a fast learner (default: 450)")
    arguments = parser.parse_args()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed}"), TimeElapsedColumn())
    folder = arguments.out.absolute()
    try:
        with Processes(folder) as processes, Progress(*columns, console=console) as progress:
            demo = Demo(folder, arguments.steps, processes, progress)
            checks = demo.run()
    except DemoError as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        return 1
    draw(demo, folder / "demo.png")
    versions = demo.history.version_count
    together = (
        f"held-out loss of the merged model {demo.merged[-1].value:.3f}, of a single learner {demo.single_loss:.3f}"
    )
    console.print(f"{together}; {versions} versions of fragments", highlight=False)
    for name, is_met in checks.items():
        console.print(f"{'[green]passed[/]' if is_met else '[red]failed[/]'}  {name}", highlight=False)
    console.print(f"\n{arguments.out / 'demo.png'}\n{arguments.out / 'report.html'}", highlight=False)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
