"""Your own checkpoint: load it first, then attach. `python examples/checkpoint.py us 200`: id, and steps in all.

Run it again with more steps. The run has the weights, and they win; what it does not have is the optimizer's state.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skerry import Learner

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")

if __name__ == "__main__":  # a DataLoader's workers may import this file again
    learner_id, steps = sys.argv[1], int(sys.argv[2])
    checkpoint = Path(f"{learner_id}.pt")
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state: dict[str, Any] = torch.load(checkpoint) if checkpoint.exists() else {"step": 0}
    if state["step"]:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    data = torch.randn(32 * steps, 16, generator=torch.Generator().manual_seed(0))[32 * state["step"] :]
    with Learner(model, target=TARGET, run="checkpoint", learner_id=learner_id, create=True) as learner:
        for step, (inputs,) in enumerate(DataLoader(TensorDataset(data), batch_size=32, num_workers=2), state["step"]):
            loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            learner.step(tokens=len(inputs), loss=loss.item())
            if step % 50 == 49:  # the file is replaced at once, so that a kill leaves a whole one
                state = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
