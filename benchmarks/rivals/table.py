"""Prints the tables of benchmarks/README.md from the committed results: `python -m benchmarks.rivals.table`."""

from __future__ import annotations

import json
from typing import Final

from benchmarks.report import Row
from benchmarks.rivals.contenders import CONTENDERS
from benchmarks.rivals.results import DIRECTORY
from benchmarks.rivals.turns import LINKS

_METRICS: Final = (
    "full synchronisation / the link's time for its bytes",
    "bytes on the wire in all",
    "CPU of all processes",
)


def table(link: str) -> str:
    """Returns one link's results as Markdown, or an empty text where there are none."""
    path = DIRECTORY / f"rivals-{link}.json"
    if not path.exists():
        return ""
    found = {(row.case, row.metric): row for row in (Row(**entry) for entry in json.loads(path.read_text()))}
    lines = ["| system | seconds | from – to | / the link's time | MB in all | CPU, s | Skerry's time / its time |"]
    lines.append("|---|---|---|---|---|---|---|")
    for title in (contender.title for contender in CONTENDERS if (contender.title, _METRICS[0]) in found):
        time, size, cpu = (found[title, metric] for metric in _METRICS)
        against = found.get((f"Skerry against {title}", "full synchronisation"))
        cells = (
            title,
            f"{time.value:.2f}",
            f"{min(time.samples):.2f} – {max(time.samples):.2f}",
            f"{time.ratio:.2f}" if time.ratio else "",
            f"{size.value:.0f}",
            f"{cpu.value:.1f}",
            f"{against.ratio:.2f}" if against and against.ratio else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for name in LINKS:
        print(f"{name}\n\n{table(name)}\n")
