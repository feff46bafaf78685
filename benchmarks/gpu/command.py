"""The command: runs the parts one after another, each in processes of its own with a time of its own."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TextIO

import click
import torch

from benchmarks.gpu.part_run import PartRun
from benchmarks.processes import environment, this_python
from benchmarks.report import DIRECTORY

# What each part measures, and the most seconds that it is given.
PARTS: Final = {
    "encoding": ("deltas quantised on the device, beside its memory and one core of the host", 60.0),
    "suite": ("the tests that need CUDA", 60.0),
    "programs": ("two learners, ranks, loaders, CUDA graphs: each must end with the run's weights", 90.0),
    "steps": ("training with and without Skerry, 124M and 1B parameters, compiled and not", 240.0),
    "learning": ("5M parameters: alone, four learners, late ones, all batches in one place", 3600.0),
}
_LEAST_S: Final = 40.0  # a part that has less left is skipped; those before it leave it so much
_OVERRUN_S: Final = 5.0  # of a part, before it is killed


@click.command(
    epilog=f"""\b
Parts:
{chr(10).join(f"  {name:<9} {subject}" for name, (subject, _) in PARTS.items())}

\b
Examples:
  python -m benchmarks.gpu                               all parts
  python -m benchmarks.gpu learning --minutes 8          one part
  python -m benchmarks.gpu --quick --device cpu          small sizes: does it run?
"""
)
@click.argument("parts", nargs=-1, type=click.Choice(list(PARTS)))
@click.option("--device", default="cuda", show_default=True, help="What to train on.")
@click.option("--quick", is_flag=True, help="Small sizes and few samples; the figures mean little.")
@click.option("--minutes", default=7.75, show_default=True, help="What does not fit is skipped, and a row says so.")
@click.option(
    "--data",
    type=click.Path(exists=True, dir_okay=False, resolve_path=True),
    help="A text to learn from.  [default: the sources of the installed Python packages]",
)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=DIRECTORY / "gpu",
    help="Where rows go.  [default: build/benchmarks/gpu]",
)
def command(
    *, parts: tuple[str, ...], device: str, quick: bool, minutes: float, data: str | None, results: Path
) -> None:
    """Measure Skerry on a GPU.

    Each row is added to RESULTS/DEVICE.jsonl as soon as it is measured. The status is 1 if a part failed or was
    skipped, or if something is not equal that has to be.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the part's processes end
    end_s = time.monotonic() + 60 * minutes
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(f"torch sees no CUDA device. torch={torch.__version__}; or: --device cpu --quick")
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name.lower().replace(' ', '-')}.jsonl"
    has_failed = False
    with path.open("a", encoding="utf-8") as file, tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as scratch:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
        _write(file, part="machine", device=name, **versions, cores=os.cpu_count(), is_quick=quick)
        chosen = parts or tuple(PARTS)
        for index, part in enumerate(chosen, start=1):
            part_s = min(PARTS[part][1], end_s - time.monotonic() - _LEAST_S * (len(chosen) - index))
            if part_s < _LEAST_S:
                _write(file, part=part, end="skipped", left_s=part_s)
                has_failed = True
                continue
            start_s = time.monotonic()
            status = run_part(part, PartRun(device, quick, start_s + part_s, data), path, scratch)
            _write(file, part=part, end=status, wall_s=round(time.monotonic() - start_s, 1))
            has_failed |= status != "done"
    click.echo(f"rows: {path}", err=True)
    sys.exit(has_failed)


def run_part(part: str, run: PartRun, path: Path, scratch: str) -> str:
    """Runs a part, whose rows go to the end of the file, and returns how it ended."""
    process = subprocess.Popen(
        this_python("benchmarks.gpu.part", part, str(path.resolve()), json.dumps(asdict(run))),
        env={**environment(), "TMPDIR": scratch},
        start_new_session=True,
    )
    try:
        code = process.wait(run.left_s + _OVERRUN_S)
    except subprocess.TimeoutExpired:
        return "cut off"
    finally:
        _kill(process)
    return "done" if code == 0 else f"failed, status {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of a part: syncers, ranks, and itself."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _write(file: TextIO, **values: Any) -> None:
    line = json.dumps(values)
    file.write(line + "\n")
    file.flush()
    click.echo(line, err=True)
