"""One island with accelerate: `python examples/accelerate_loop.py LEARNER_ID STEPS OUT`."""

import itertools
import os
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from skerry import attach

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")

if __name__ == "__main__":  # a DataLoader's workers may import this file again
    learner_id, steps, out = sys.argv[1:]
    inputs = torch.randn(256, 8)
    data = list(zip(inputs, inputs.roll(1, dims=1) + torch.randn(256, 8), strict=True))
    loader = DataLoader(data, batch_size=16, num_workers=2, persistent_workers=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    learner = attach(
        model, optimizer, tokens_per_step=32, planned_token_count=2 * 32 * int(steps),  # of two islands
        target=TARGET, run="accelerate", learner_id=learner_id, create=True,
    )  # fmt: skip
    for inputs, targets in itertools.chain.from_iterable(itertools.repeat(loader)):
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if learner.stats.step_count == int(steps):
            break
    learner.leave(60.0, load_merged=True)
    accelerator.save_model(model, out)
