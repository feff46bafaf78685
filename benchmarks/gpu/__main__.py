"""Runs the GPU benchmark: `python -m benchmarks.gpu`, or some of its tables by name."""

from __future__ import annotations

import json
import platform
import signal
import sys
import time
import traceback
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Final

import click
import torch
from rich.console import Console

from benchmarks.report import Row, write_rows
from benchmarks.speed.measuring import Size

RESULTS: Final = Path(__file__).parent / "results"
CLAIM: Final = "(1: yes)"  # ends the metric of a row that has to be 1
TABLES: Final = {
    "encoding": "deltas quantised on the device, beside its memory and one core of the host",
    "steps": "training with and without Skerry, 124M and 1B parameters, compiled and not",
    "programs": "loaders, GradScaler, CUDA graphs, several ranks: each must end with the run's weights",
}


@click.command(
    epilog=f"""\b
Tables:
{chr(10).join(f"  {name:<9} {what}" for name, what in TABLES.items())}

\b
Examples:
  python -m benchmarks.gpu                               all tables, 7 minutes on an H100
  python -m benchmarks.gpu encoding steps                two tables
  python -m benchmarks.gpu --quick --device cpu          small sizes: does it run?
"""
)
@click.argument("tables", nargs=-1, type=click.Choice(list(TABLES)))
@click.option("--device", default="cuda", show_default=True, help="What to train on.")
@click.option("--quick", is_flag=True, help="Small sizes and few samples; the figures mean little.")
@click.option("--keep", is_flag=True, help="Put each row, once measured, into benchmarks/gpu/results.")
def main(*, tables: tuple[str, ...], device: str, quick: bool, keep: bool) -> None:
    """Measure Skerry on a GPU.

    Each table's rows are written to build/benchmarks/gpu-TABLE.json. A table that fails
    prints its error and the others are measured nevertheless. The status is then 1, as it is if something is not equal
    that has to be. Servers listen on loopback and are
    ended.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers and stores go with this process
    size, where = Size(2 if quick else 5, quick), torch.device(device)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else platform.machine()
    click.echo(f"device={name}, torch={torch.__version__}", err=True)
    failed = False
    for table in tables or TABLES:
        start_s = time.perf_counter()
        rows: list[Row] = []
        try:
            for row in import_module(f"benchmarks.gpu.{table}").rows(size, where):
                rows.append(row)
                failed = failed or (row.metric.endswith(CLAIM) and not row.value)
                if keep:
                    _keep(table, name, rows)
                click.echo(f"{row.case} | {row.metric} | {row.value:.4g} {row.unit}", err=True)
        except Exception:  # noqa: BLE001 - the other tables are worth having
            traceback.print_exc()
            failed = True
        write_rows(f"gpu-{table}", rows, console=Console(width=170))
        click.echo(f"{table}: {time.perf_counter() - start_s:.0f} s", err=True)
    sys.exit(failed)


def _keep(table: str, device: str, rows: list[Row]) -> None:
    path = RESULTS / device.lower().replace(" ", "-") / f"{table}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"device": device, "torch": torch.__version__, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
