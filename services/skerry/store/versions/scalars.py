"""Converts the scalars of a merge between float32 numbers (the algorithm) and their bits in hex (the log)."""

from __future__ import annotations

import numpy as np

from skerry.algorithm.step import Scalars
from skerry.store.log.entries import MergeScalars, float32_from_hex, float32_to_hex


def scalars_from_record(record: MergeScalars) -> Scalars:
    """Returns the numbers that a commit names, exactly."""
    # Entries of format 1 have neither decay nor gain.
    return Scalars(
        np.float32(float32_from_hex(record.rate)),
        np.float32(float32_from_hex(record.momentum)),
        np.array([float32_from_hex(value) for value in record.tensor_scales], np.float32),
        np.array([[float32_from_hex(value) for value in row] for row in record.coefficients], np.float32),
        np.float32(float32_from_hex(record.decay or record.momentum)),
        np.float32(float32_from_hex(record.gain) if record.gain else 1.0),
    )


def scalars_to_record(scalars: Scalars) -> MergeScalars:
    """Returns what a commit names."""
    return MergeScalars(
        float32_to_hex(float(scalars.rate)),
        float32_to_hex(float(scalars.momentum)),
        tuple(float32_to_hex(value) for value in scalars.tensor_scales),
        tuple(tuple(float32_to_hex(value) for value in row) for row in scalars.coefficients),
        float32_to_hex(float(scalars.decay)),
        float32_to_hex(float(scalars.gain)),
    )
