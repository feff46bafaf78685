"""Gradient accumulation, a schedule and bfloat16 autocast: `python examples/accumulation.py us`, a learner's id."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skerry import Learner

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")
STEPS, MICRO_BATCHES = 200, 4

if __name__ == "__main__":  # a DataLoader's workers may import this file again
    learner_id = sys.argv[1]
    data = torch.randn(STEPS * 16, 16, generator=torch.Generator().manual_seed(sum(learner_id.encode())))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(
        TensorDataset(data), batch_size=8, num_workers=2, persistent_workers=True, pin_memory=device == "cuda"
    )
    torch.manual_seed(0)
    # The weights stay float32, so that small steps are not lost; autocast in bfloat16 needs no GradScaler.
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    planned = 2 * STEPS * MICRO_BATCHES * 8  # of two learners
    with Learner(
        model, target=TARGET, run="accumulation", learner_id=learner_id, create=True, planned_token_count=planned
    ) as learner:
        for number, (batch,) in enumerate((batch for _ in range(2) for batch in loader), 1):
            inputs = batch.to(device, non_blocking=True)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(model(inputs).float(), inputs.sin().sum(1, keepdim=True))
            (loss / MICRO_BATCHES).backward()
            if number % MICRO_BATCHES == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                learner.step(tokens=MICRO_BATCHES * 8, loss=loss.item())  # once, with all tokens of the step
