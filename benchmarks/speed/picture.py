"""One picture of all tables: each figure that has an aim, as a multiple of it, so that 1 is the aim."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from benchmarks.report import Row
from benchmarks.speed.table import AIMS

_MET: Final = "#0ca678"
_SHORT: Final = "#e03131"
_FAINT: Final = "#8a96a3"


def draw(tables: Mapping[str, list[Row]], path: Path) -> Path:
    """Draws how far each row that has an aim is from it, on a logarithmic scale, and returns the picture's path."""
    bars = []
    for table, rows in tables.items():
        for row in rows:
            for aim in AIMS:
                if share := aim.share(table, row):
                    value = row.ratio if aim.is_ratio else row.value
                    bars.append((f"{row.metric.partition(' / ')[0]}\n{row.case}", share, f"{value:.3g}", str(aim)))
    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(
        {"axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True}
    ):
        figure, axes = plt.subplots(figsize=(11, 1.2 + 0.5 * len(bars)), layout="constrained")
        for place, (_, share, found_text, aim_text) in enumerate(bars):
            axes.barh(place, share - 1, left=1, color=_MET if share >= 1 else _SHORT, height=0.6)
            axes.text(max(share, 1) * 1.05, place, f"{found_text}, aim {aim_text}", va="center", fontsize=8)
        axes.axvline(1, color=_FAINT, linewidth=1)
        axes.set_xscale("log")
        axes.set_yticks(range(len(bars)), [name for name, *_ in bars], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("how many times better than the aim (1: just met)")
        axes.margins(x=0.35)
        figure.savefig(path, dpi=130)
        plt.close(figure)
    return path
