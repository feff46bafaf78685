"""What a run costs to open and to hold, by the entries of its log.

    python -m benchmarks.history [--entries 10000 100000] [--fragments 24] [--learners 8] [--parts 1] [--delay-ms 30]

Logs of these lengths are made by the store's own encoder and fold, in a folder store, and opened by a process of its
own: its wall and CPU time, what the run takes of its memory, and the log's bytes. With a delay, also how long opening
takes when every request takes that much longer, as in a distant bucket.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks.history.opening import child, open_elsewhere, resident_bytes
from benchmarks.history.synthesis import Synthesis, folder_writer
from benchmarks.report import Row, measured, write_rows


def rows_of(entry_count: int, arguments: argparse.Namespace, root: Path) -> list[Row]:
    """Makes a log of that length and measures opening it."""
    started = time.perf_counter()
    synthesis = Synthesis(
        folder_writer(root),
        fragment_count=arguments.fragments,
        learner_count=arguments.learners,
        part_count=arguments.parts,
        has_checkpoints=not arguments.no_checkpoints,
        remove=lambda name: (root / name).unlink(),
    )
    columns = (TextColumn("writing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("writing", total=entry_count)
        held: list[tuple[int, float]] = []

        def note(position: int) -> None:
            progress.update(task, completed=position)
            held.append((position, resident_bytes()))

        synthesis.grow(entry_count, note)
    case = f"{synthesis.state.position:,} entries"
    rows = [
        measured(case, "written in", [time.perf_counter() - started], "s"),
        measured(case, "log", [synthesis.log_bytes / 1e6], "MB"),
        measured(case, "memory that the fold gains a million entries", [_slope(held)], "MB"),
    ]
    near = [open_elsewhere(root, delay_s=0.0) for _ in range(arguments.samples)]
    rows += [
        measured(case, "opened in", [one["seconds"] for one in near], "s", limit=2.0),
        measured(case, "opened in, CPU", [one["cpu_seconds"] for one in near], "s"),
        measured(
            case, "memory of the run", [(one["resident_bytes"] - one["before_bytes"]) / 1e6 for one in near], "MB"
        ),
        measured(case, "memory of the process", [one["peak_bytes"] / 1e6 for one in near], "MB", limit=150.0),
    ]
    if arguments.delay_ms:
        far = [open_elsewhere(root, delay_s=arguments.delay_ms / 1000) for _ in range(arguments.samples)]
        metric = f"opened in, {arguments.delay_ms:g} ms a request"
        rows.append(measured(case, metric, [one["seconds"] for one in far], "s", limit=10.0))
    return rows


def _slope(held: list[tuple[int, float]]) -> float:
    """Returns MB a million entries over the second half of the log, when every version has been forgotten often."""
    late = held[len(held) // 2 :]
    positions, sizes = [float(position) for position, _ in late], [size for _, size in late]
    return statistics.linear_regression(positions, sizes).slope


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[10_000, 100_000], help="lengths of the logs")
    parser.add_argument("--fragments", type=int, default=24, help="fragments of the run")
    parser.add_argument("--learners", type=int, default=8, help="learners, each in every round")
    parser.add_argument("--parts", type=int, default=1, help="parts of each delta")
    parser.add_argument(
        "--delay-ms", type=float, default=30.0, help="what a distant store adds to each request; 0: none"
    )
    parser.add_argument("--no-checkpoints", action="store_true", help="runs of the format levels that had none")
    parser.add_argument("--samples", type=int, default=3, help="measurements of each opening")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        child(arguments.child, arguments.delay_ms / 1000)
        return
    rows: list[Row] = []
    for entry_count in arguments.entries:
        with tempfile.TemporaryDirectory(prefix="skerry-history-") as directory:
            rows += rows_of(entry_count, arguments, Path(directory))
    write_rows("history", rows)


if __name__ == "__main__":
    main()
