"""The picture of a plan: compute utilisation over bandwidth, a line for each setting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skerry.planning.formulas import GRID_BITS_PER_S, synchronous_name, synchronous_utilisation
from skerry.planning.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(parameters: float, step_s: float, plans: Sequence[Plan]) -> Figure:
    """Draws the slowest learner's utilisation with each plan, and with training that waits for the network."""
    from matplotlib.figure import Figure  # slow to load, and not everybody has it

    gigabits = [bits_per_s / 1e9 for bits_per_s in GRID_BITS_PER_S]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xscale="log", xlabel="bandwidth of a link, Gbit/s", ylabel="compute utilisation", ylim=(0, 1.02)
    )
    for h in (1, *sorted({plan.setting.inner_step_count for plan in plans})):
        shares = [synchronous_utilisation(parameters, step_s, bits, h) for bits in GRID_BITS_PER_S]
        axes.plot(gigabits, shares, linestyle="dotted" if h == 1 else "dashed", label=synchronous_name(h))
    for plan in plans:
        learner = min(plan.learners, key=lambda learner: learner.training_share)
        shares = [learner.utilisation_at(bits) for bits in GRID_BITS_PER_S]
        axes.plot(gigabits, shares, label=f"Skerry {plan.setting}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    return figure
