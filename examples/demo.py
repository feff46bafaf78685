"""Trains one model on three learners while one of them and the syncer are killed: `python -m examples.demo`.

Three `skerry learn` processes, one of them three times slower, train through a `skerry serve` process. After a third of
the steps a learner is killed with SIGKILL and comes back; after two thirds the syncer is killed, and comes back from
its store. Before all that, a single learner trains on as many tokens, to compare with. Everything else is read from
what Skerry writes for everybody: the learners' metrics, `skerry log --json`, `skerry verify --json`, `skerry export`.

It leaves demo.png and summary.json in --out, and exits with 1 if the merged model is no better than the single
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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import matplotlib as mpl
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file

from skerry_learner.batches import held_out_batches
from skerry_learner.corpus import load_corpus
from skerry_learner.inner_training import evaluate
from skerry_learner.model import Gpt
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
POINT_COUNT: Final = 12  # exports of the merged model that are evaluated
TIMEOUT_S: Final = 120.0


class DemoError(Exception):
    """A process failed, ended too early or did not end in time; the message has the end of its log."""


@dataclass
class Follower:
    """The metrics lines that one learner has written so far; a restarted learner goes on in the same file."""

    path: Path
    lines: list[dict[str, Any]] = field(default_factory=list)
    offset: int = 0

    def poll(self) -> None:
        """Reads the whole lines that were added."""
        if self.path.exists():
            content = self.path.read_bytes()[self.offset :]
            whole = content[: content.rfind(b"\n") + 1]
            self.offset += len(whole)
            self.lines += [json.loads(text) for text in whole.splitlines()]

    @property
    def step(self) -> int:
        """The newest step, 0 before the first."""
        return int(self.lines[-1]["step"]) if self.lines else 0

    def last_of_each_process(self) -> Iterable[dict[str, Any]]:
        """Returns the last line of each process of this learner, which has that process's totals."""
        return {line["attempt"]: line for line in self.lines}.values()

    def evaluations(self) -> list[tuple[float, int, float]]:
        """Returns time, step and loss of every evaluation on held-out text."""
        return [(line["unix_s"], line["step"], line["val_loss"]) for line in self.lines if line["val_loss"] is not None]


class Processes:
    """`skerry` commands as child processes, each with a log; leaving the context kills those that still run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Variables that begin with SKERRY_ may be meant for another run. One thread a learner: all share few cores.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SKERRY_")}
        self._environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str) -> None:
        """Starts `skerry ARGUMENTS`; its output is appended to logs/NAME.log."""
        command = [sys.executable, "-m", "skerry.cli", *arguments]
        with self._log_path(name).open("ab") as log:
            self.running[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment, cwd=self._folder
            )

    def output(self, *arguments: str, accepted: Sequence[int] = (0,)) -> str:
        """Returns what `skerry ARGUMENTS` prints.

        Raises:
            DemoError: its exit status is not one of those accepted.
        """
        command = [sys.executable, "-m", "skerry.cli", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self._environment, cwd=self._folder
        )
        if done.returncode not in accepted:
            raise DemoError(f"`skerry {' '.join(arguments)}` ended with status {done.returncode}\n{done.stderr}")
        return done.stdout

    def kill(self, name: str) -> None:
        """Ends a process with SIGKILL."""
        process = self.running.pop(name)
        process.kill()
        process.wait()

    def check(self) -> None:
        """Raises DemoError if a process that should run has ended."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise DemoError(f"{name} ended too early, with status {process.returncode}\n{self._log_end(name)}")

    def wait(self, name: str) -> None:
        """Waits until a process ends by itself; raises DemoError if it fails or takes too long."""
        process = self.running.pop(name)
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise DemoError(f"{name} did not end within {TIMEOUT_S:.0f} s\n{self._log_end(name)}") from None
        if status != 0:
            raise DemoError(f"{name} ended with status {status}\n{self._log_end(name)}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def _log_path(self, name: str) -> Path:
        path = self._folder / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _log_end(self, name: str) -> str:
        path = self._log_path(name)
        return "\n".join([f"log={path}", *path.read_text(errors="replace").splitlines()[-15:]])


class Demo:
    """One course of the demo: what is started, killed and restarted at which step, and when it happened."""

    def __init__(self, folder: Path, step_count: int, processes: Processes, show: Callable[[Demo], None]) -> None:
        self.folder = folder
        self.step_count = step_count
        self.phase = "a single learner, to compare with"
        self.learners = {name: Follower(folder / "learners" / name / "metrics.jsonl") for name in SLOWDOWNS}
        self.single = Follower(folder / "learners" / "single" / "metrics.jsonl")
        self.moments_unix_s: dict[str, float] = {}
        self._processes = processes
        self._show = show
        self._listen = "127.0.0.1:0"

    @property
    def store_url(self) -> str:
        """The store, which every demo makes anew."""
        return f"file://{self.folder / 'store'}"

    @property
    def _token_count(self) -> int:
        """About how many tokens all learners train until the run is closed."""
        step_count = sum(self.step_count / slowdown for slowdown in SLOWDOWNS.values())
        step_count -= self.step_count // 2 - self.step_count // 3  # while one is dead
        return round(step_count) * BATCH_SIZE * MODEL_CONFIGS[MODEL].context

    def run(self) -> None:
        """Trains the single learner, then three through both outages, and closes the run."""
        for name in ("store", "learners", "logs", "exports"):  # the folder may hold other files
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        policy = {"inner_step_count": INNER_STEP_COUNT, "lease_term_s": 5.0, "planned_token_count": self._token_count}
        (self.folder / "policy.json").write_text(json.dumps(policy))
        self._processes.start("single", *self._learn("single", self.step_count), "--alone")
        while self._processes.running["single"].poll() is None:
            self._look()
        self._processes.wait("single")
        self.phase = "three learners"
        self._serve()
        for name in SLOWDOWNS:
            self._join(name)
        self._look_until(lambda: all(follower.lines for follower in self.learners.values()))
        self.moments_unix_s["started"] = min(follower.lines[0]["unix_s"] for follower in self.learners.values())
        self._kill_and_restart(KILLED, self.step_count // 3, self.step_count // 2)
        # H steps without a syncer: every fragment misses a contribution.
        syncer_step = self.step_count * 2 // 3
        self._kill_and_restart("syncer", syncer_step, syncer_step + INNER_STEP_COUNT)
        self._look_until(lambda: self.learners[TIMEKEEPER].step >= self.step_count)
        self._processes.output("runs", "close", RUN, "--target", self._listen)
        self.moments_unix_s["closed"] = time.time()
        for name in SLOWDOWNS:  # which stop when they hear that the run is closed
            self._processes.wait(name)
        for follower in self.learners.values():
            follower.poll()
        self._processes.running["syncer"].send_signal(signal.SIGTERM)
        self._processes.wait("syncer")

    def _kill_and_restart(self, name: str, killed_at_step: int, back_at_step: int) -> None:
        timekeeper = self.learners[TIMEKEEPER]
        self._look_until(lambda: timekeeper.step >= killed_at_step)
        self._processes.kill(name)
        self.moments_unix_s[f"{name} killed"] = time.time()
        self.phase = f"{name} is killed"
        self._look_until(lambda: timekeeper.step >= back_at_step)
        if name == "syncer":
            self._serve()
        else:
            line_count = len(self.learners[name].lines)
            self._join(name)
            self._look_until(lambda: len(self.learners[name].lines) > line_count)
        self.moments_unix_s[f"{name} back"] = time.time()
        self.phase = f"{name} is back"

    def _serve(self) -> None:
        port_file = self.folder / "syncer-port"
        port_file.unlink(missing_ok=True)
        arguments = ("--new-store", "--store", self.store_url, "--listen", self._listen, "--port-file", str(port_file))
        self._processes.start("syncer", "serve", *arguments)
        self._look_until(lambda: port_file.exists() and bool(port_file.read_text().strip()))
        self._listen = f"127.0.0.1:{port_file.read_text().strip()}"

    def _join(self, name: str) -> None:
        # It trains until it hears that the run is closed.
        arguments = self._learn(name, 1_000_000)
        policy = ("--policy", str(self.folder / "policy.json"), "--slowdown", str(SLOWDOWNS[name]))
        self._processes.start(name, *arguments, RUN, "--target", self._listen, "--region", name[:2], *policy)

    def _learn(self, name: str, step_count: int) -> list[str]:
        # The single learner reads all of the data, so that its shard is no handicap.
        shard = f"{list(SLOWDOWNS).index(name) + 1}/{len(SLOWDOWNS)}" if name in SLOWDOWNS else "1/1"
        return [
            *(
                "learn",
                "--learner-id",
                name,
                "--model",
                MODEL,
                "--shard",
                shard,
                "--batch",
                str(BATCH_SIZE),
                "--seed",
                "0",
            ),
            *("--steps", str(step_count), "--horizon", str(self.step_count), "--learning-rate", "3e-3"),
            *("--warmup", "50", "--checkpoint-every", "50", "--eval-windows", "128"),
            *("--eval-every", str(round(40 / SLOWDOWNS.get(name, 1.0)))),
            *("--device", "cpu", "--threads", "1", "--work-dir", str(self.folder / "learners" / name)),
        ]

    def _look_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            self._look()
            self._processes.check()

    def _look(self) -> None:
        for follower in (self.single, *self.learners.values()):
            follower.poll()
        self._show(self)
        time.sleep(0.02)


@dataclass(frozen=True)
class Evidence:
    """What the store and the learners' files hold after the demo."""

    fates: dict[str, str]  # of each delta, by its id
    owners: dict[str, str]  # the learner of each delta
    accepted: list[tuple[float, str]]  # time and learner of each delta
    committed: list[tuple[float, str, int]]  # time, fragment and log position of each version that a merge made
    merged: list[tuple[float, float]]  # time and held-out loss of the merged model
    single_loss: float
    verified: bool


def gather(demo: Demo, processes: Processes) -> Evidence:
    """Reads the run's log, replays every version and evaluates the merged model at several positions."""
    store = ("--store", demo.store_url)
    fates: dict[str, str] = {}
    owners: dict[str, str] = {}
    accepted: list[tuple[float, str]] = []
    committed: list[tuple[float, str, int]] = []
    for text in processes.output("log", RUN, *store, "--json").splitlines():
        entry = json.loads(text)
        for item in entry["items"]:
            if item["kind"] == "accepted" and item["is_admitted"] and item["base_version"] >= 0:
                owners[item["delta"]] = item["learner"]
                accepted.append((entry["written_at_unix_s"], item["learner"]))
            elif item["kind"] == "committed" and item["is_admitted"] and item["version"] > 0:
                committed.append((entry["written_at_unix_s"], item["fragment"], entry["position"]))
        fates |= {fate["delta"]: fate["fate"] for fate in entry["fates"] if fate["delta"] in owners}
    verified = json.loads(processes.output("verify", RUN, *store, "--json", accepted=(0, 1)))

    config = MODEL_CONFIGS["tiny"]
    corpus = load_corpus(None)
    windows = held_out_batches(corpus.held_out, config, batch_size=8, window_count=128)
    model = Gpt(config)
    merged: list[tuple[float, float]] = []
    (demo.folder / "exports").mkdir()
    chosen = {round((number + 1) * len(committed) / POINT_COUNT) - 1 for number in range(POINT_COUNT)}
    for unix_s, _, position in (committed[index] for index in sorted(chosen) if index >= 0):
        path = demo.folder / "exports" / f"{position}.safetensors"
        processes.output("export", RUN, *store, "--position", str(position), "--out", str(path))
        model.load_state_dict(load_file(path))
        merged.append((unix_s, evaluate(model, windows)))
    model.load_state_dict(torch.load(demo.single.path.with_name("checkpoint.pt"), weights_only=True)["model"])
    return Evidence(fates, owners, accepted, committed, merged, evaluate(model, windows), bool(verified["ok"]))


def summarise(demo: Demo, evidence: Evidence) -> dict[str, Any]:
    """Returns the figures, with the checks by name."""
    totals = Counter[str]()
    for follower in demo.learners.values():
        for line in follower.last_of_each_process():
            for name in ("bytes_up", "bytes_down", "parameters_up_count", "parameters_down_count"):
                totals[name] += line[name]
    lines = [line for follower in demo.learners.values() for line in follower.lines]
    killed, back = demo.moments_unix_s["syncer killed"], demo.moments_unix_s["syncer back"]
    has_fates = set(evidence.fates) == set(evidence.owners) and "pending" not in evidence.fates.values()
    for name, follower in demo.learners.items():
        counted = sum(line["deltas_acknowledged"] for line in follower.last_of_each_process())
        logged = sum(owner == name for owner in evidence.owners.values())
        # The last acknowledgements of a killed learner may not have reached its metrics.
        has_fates &= counted <= logged if name == KILLED else counted == logged
    merged_loss = evidence.merged[-1][1]
    return {
        "merged_loss": merged_loss,
        "single_loss": evidence.single_loss,
        "version_count": len(evidence.committed),
        "deltas_by_fate": dict(Counter(evidence.fates.values())),
        "bits_per_parameter_up": 8 * totals["bytes_up"] / totals["parameters_up_count"],
        "bits_per_parameter_down": 8 * totals["bytes_down"] / totals["parameters_down_count"],
        "longest_pause_ms": max(line["sync_stall_ms"] for line in lines),
        "steps_without_syncer": sum(killed < line["unix_s"] < back for line in lines),
        "checks": {
            "learning together helps": merged_loss < evidence.single_loss,
            "every version replays from its deltas": evidence.verified,
            "every acknowledged delta has its fate": has_fates,
        },
    }


def draw(demo: Demo, evidence: Evidence, summary: dict[str, Any], path: Path) -> None:
    """Draws the losses, and what was sent when, with both outages."""
    start_s = demo.moments_unix_s["started"]
    figure, (losses, exchange) = plt.subplots(
        2, 1, figsize=(11, 8.6), dpi=140, sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    merged, single = summary["merged_loss"], summary["single_loss"]
    figure.suptitle(f"Three learners train one model: loss {merged:.3f} together, {single:.3f} alone", fontsize=15)
    for name, follower in demo.learners.items():
        curve = [(unix_s - start_s, loss) for unix_s, _, loss in follower.evaluations()]
        label = name if SLOWDOWNS[name] == 1 else f"{name}, {SLOWDOWNS[name]:.0f}x slower"
        losses.plot(*zip(*curve, strict=True), color=COLOURS[name], marker=".", lw=1, label=label)
    # The single learner's losses stand where the timekeeper has taken as many steps.
    time_of_step = {line["step"]: line["unix_s"] - start_s for line in demo.learners[TIMEKEEPER].lines}
    points = [(time_of_step[step], loss) for _, step, loss in demo.single.evaluations() if step in time_of_step]
    losses.plot(*zip(*points, strict=True), color="#5c6773", lw=2, ls="--", label="a single learner, as many tokens")
    points = [(unix_s - start_s, loss) for unix_s, loss in evidence.merged]
    losses.plot(*zip(*points, strict=True), color=MERGED_COLOUR, lw=2.8, marker="o", label="the merged model")
    losses.set_ylim(min(merged, single) - 0.1, evidence.merged[0][1] + 0.5)
    losses.set_ylabel("loss on held-out text, nats a byte")
    losses.legend(frameon=False)
    fragments = sorted({fragment for _, fragment, _ in evidence.committed}, reverse=True)
    rows = [
        (fragment, MERGED_COLOUR, [row[0] for row in evidence.committed if row[1] == fragment])
        for fragment in fragments
    ]
    rows += [
        (name, COLOURS[name], [row[0] for row in evidence.accepted if row[1] == name]) for name in reversed(SLOWDOWNS)
    ]
    for height, (_, colour, times_s) in enumerate(rows):
        exchange.eventplot([time_s - start_s for time_s in times_s], lineoffsets=height, linelengths=0.6, colors=colour)
    exchange.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    exchange.set_title("Deltas of each learner, and versions of each fragment", loc="left", fontsize=11)
    exchange.set_xlabel("seconds since the learners' first step")
    for axes in (losses, exchange):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6eaee")
    for name in (KILLED, "syncer"):
        first_s, last_s = (demo.moments_unix_s[f"{name} {moment}"] - start_s for moment in ("killed", "back"))
        for axes in (losses, exchange):
            axes.axvspan(first_s, last_s, color=COLOURS[name], alpha=0.15, lw=0)
        losses.text(first_s, losses.get_ylim()[1], f" {name}\n killed", color=COLOURS[name], va="top")
    figure.savefig(path, facecolor="white")


def main() -> int:
    """Runs the demo and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build", "demo"), help="folder for everything it makes")
    parser.add_argument("--steps", type=int, default=600, help="training steps of a fast learner (default: 600)")
    arguments = parser.parse_args()
    folder = arguments.out.absolute()
    torch.set_num_threads(1)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("step {task.completed}"), TimeElapsedColumn())
    try:
        with Processes(folder) as processes:
            with Progress(*columns, console=console) as progress:
                bars: dict[str, TaskID] = {
                    name: progress.add_task(name, total=arguments.steps) for name in ("single", *SLOWDOWNS)
                }

                phases: list[str] = []

                def show(demo: Demo) -> None:
                    if demo.phase not in phases:
                        phases.append(demo.phase)
                        progress.console.print(f"step {demo.learners[TIMEKEEPER].step}: {demo.phase}", highlight=False)
                    for name, follower in {"single": demo.single, **demo.learners}.items():
                        loss = f", loss {follower.evaluations()[-1][2]:.3f}" if follower.evaluations() else ""
                        progress.update(bars[name], completed=follower.step, description=f"{name}{loss}")

                demo = Demo(folder, arguments.steps, processes, show)
                demo.run()
            console.print("reading the log, replaying every version, evaluating the merged model")
            evidence = gather(demo, processes)
    except DemoError as error:
        console.print(f"error: {error}", highlight=False, markup=False)
        return 1
    summary = summarise(demo, evidence)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    draw(demo, evidence, summary, folder / "demo.png")
    for name, value in summary.items():
        if name != "checks":
            console.print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}", highlight=False)
    for name, is_met in summary["checks"].items():
        console.print(f"{'[green]passed[/]' if is_met else '[red]failed[/]'}  {name}", highlight=False)
    console.print(f"\n{arguments.out / 'demo.png'}\n{arguments.out / 'summary.json'}", highlight=False)
    return 0 if all(summary["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
