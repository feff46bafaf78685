"""Simulates the published tables: `python -m benchmarks.goodput`."""

from __future__ import annotations

import argparse

from benchmarks.goodput.published import cells
from benchmarks.report import Row, write_rows


def main() -> None:
    """Prints each cell; the limit is the published value."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.goodput", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    rows = []
    for cell in cells(parser.parse_args().seed):
        metrics = {cell.metric: cell.simulated} | ({} if cell.goodput is None else {"goodput": cell.goodput})
        for metric, value in metrics.items():
            rows.append(Row(cell.case, metric, value, "%", cell.published, value / cell.published))
    write_rows("goodput", rows)


if __name__ == "__main__":
    main()
