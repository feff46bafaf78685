"""A plain PyTorch loop: `python examples/plain.py us` and `... eu` in two terminals, beside `skerry serve`."""

import os
import sys

import torch
from torch import nn

from skerry.client import Learner

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")
STEPS = 300

learner_id = sys.argv[1]
draw = torch.Generator().manual_seed(sum(learner_id.encode()))  # each learner has data of its own
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with Learner(
    model, target=TARGET, run="plain", learner_id=learner_id, create=True, planned_step_count=STEPS
) as learner:
    for step in range(STEPS):
        inputs = torch.randn(32, 16, generator=draw)
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(inputs), loss=loss.item())
        if step % 50 == 49:
            print(f"step {step + 1}, loss {loss.item():.3f}, versions {dict(learner.stats.versions)}")
