"""Gradient accumulation, a learning rate schedule and bfloat16 autocast: one `learner.step` for each optimizer step.

`python examples/accumulation.py us`, with the learner's id.
"""

import os
import sys

import torch
from torch import nn

from skerry.client import Learner

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")
STEPS, MICRO_BATCHES = 200, 4

learner_id = sys.argv[1]
draw = torch.Generator().manual_seed(sum(learner_id.encode()))
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
# The weights stay float32, so that small steps are not lost; autocast computes in bfloat16, which needs no GradScaler.
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)

with Learner(
    model, target=TARGET, run="accumulation", learner_id=learner_id, create=True, planned_step_count=STEPS
) as learner:
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            inputs = torch.randn(8, 16, generator=draw).to(device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(inputs).float(), inputs.sin().sum(1, keepdim=True))
            (loss / MICRO_BATCHES).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        learner.step(tokens=MICRO_BATCHES * 8, loss=loss.item())  # all tokens of the step
