"""A scheduler of PyTorch that follows the run, so that learners of any speed have the same rate and end together.

Start `skerry serve`, then in two more terminals `python examples/schedule.py us` and `... eu 3`, three times slower.
"""

import os
import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skerry import attach

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")
PLANNED_TOKENS = 400 * 32
POSITIONS = 300  # of the schedule, from the run's begin to its end

if __name__ == "__main__":  # a DataLoader's workers may import this file again
    learner_id, slowness = sys.argv[1], float(sys.argv[2]) if sys.argv[2:] else 1
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with attach(
        model,
        optimizer,
        tokens_per_step=32,
        target=TARGET,
        run="schedule",
        learner_id=learner_id,
        create=True,
        planned_token_count=PLANNED_TOKENS,
    ) as learner:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=POSITIONS)
        draw = torch.Generator().manual_seed(sum(learner_id.encode()))
        data = TensorDataset(torch.randn(PLANNED_TOKENS, 16, generator=draw))
        for (inputs,) in DataLoader(data, batch_size=32, num_workers=2):
            time.sleep(0.02 * slowness)
            loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            while scheduler.last_epoch < int((POSITIONS - 1) * (learner.progress or 0)):
                scheduler.step()
            if learner.progress == 1:
                break
    print(f"steps {learner.stats.step_count}, rate {scheduler.get_last_lr()[0]:.1e}, not merged {learner.stats.causes}")
