"""One rank of the example with accelerate; it also leaves the weights that it ended with in FOLDER/rank-N.pt.

`accelerate_ranks.py LEARNER STEPS FOLDER`, as the example.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import torch

_EXAMPLE = Path(__file__).parents[3] / "examples" / "accelerate_loop.py"

if __name__ == "__main__":
    ended = runpy.run_path(str(_EXAMPLE), run_name="__main__")
    folder = Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    stats = ended["learner"].stats
    torch.save(
        {
            "wrapped": type(ended["model"]).__name__,
            "counts": (stats.step_count, stats.token_count, stats.unsent_step_count),
            "weights": ended["accelerator"].unwrap_model(ended["model"]).state_dict(),
        },
        folder / f"rank-{os.environ.get('RANK', '0')}.pt",
    )
