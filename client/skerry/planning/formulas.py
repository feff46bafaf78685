"""Bandwidth and compute utilisation of training over slow links, as functions of the model and of H.

    N parameters · C seconds of computing a step · W bit/s of a link, each way · b bits a parameter, each way
    data-parallel (H = 1) and DiLoCo:   T = b N / W      stall = max(T / 48, T - 0.6 C)      u = H C / (H C + stall)
    Decoupled DiLoCo, mean of a link:   W = b N / (H C)
    the same for one fragment:          W = b N / (H tau C), of P = H fragments one of which takes tau steps

Source: Scaling Laws for DiLoCo (arXiv 2503.09799), table 6, which reads W on a grid of 50 points from 0.1 to 1000
Gbit/s, and to which stall and b = 12 are fitted. Decoupled DiLoCo (arXiv 2604.21428).
"""

from __future__ import annotations

from typing import Final

SYNCHRONOUS_BITS: Final = 12
PAPER_TAU: Final = 2
UTILISATIONS: Final = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID_BITS_PER_S: Final = tuple(1e9 * 10 ** (-1 + 4 * point / 49) for point in range(50))


def synchronous_name(inner_step_count: int) -> str:
    """Returns what training that waits for the network is called."""
    return "data-parallel" if inner_step_count == 1 else f"DiLoCo H={inner_step_count}"


def synchronous_utilisation(parameters: float, step_s: float, bits_per_s: float, inner_step_count: int = 1) -> float:
    """Returns the share of time in which data-parallel training (H = 1) or DiLoCo computes."""
    N, C, W, H = parameters, step_s, bits_per_s, inner_step_count
    T = SYNCHRONOUS_BITS * N / W
    stall = max(T / 48, T - 0.6 * C)
    return H * C / (H * C + stall)


def synchronous_bits_per_s(
    parameters: float, step_s: float, utilisation: float, inner_step_count: int = 1
) -> float | None:
    """Returns the least bandwidth of the grid with which the utilisation is reached; None if it is not."""
    for bits_per_s in GRID_BITS_PER_S:
        if synchronous_utilisation(parameters, step_s, bits_per_s, inner_step_count) >= utilisation:
            return bits_per_s
    return None


def mean_bits_per_s(bits: float, parameters: float, step_s: float, inner_step_count: int) -> float:
    """Returns what a link carries each way where every fragment moves once in H steps, spread evenly."""
    return bits * parameters / (inner_step_count * step_s)


def fragment_bits_per_s(
    bits: float, parameters: float, step_s: float, inner_step_count: int, tau: int = PAPER_TAU
) -> float:
    """Returns the rate of one fragment of H that takes tau steps: the paper's figure; tau of them are in flight."""
    return mean_bits_per_s(bits, parameters, step_s, inner_step_count) / tau
