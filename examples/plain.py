"""A plain PyTorch loop: `python examples/plain.py us` and `... eu` in two terminals, beside `skerry serve`."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skerry import Learner

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")
EPOCHS, BATCHES, BATCH_SIZE = 3, 100, 32

if __name__ == "__main__":  # a DataLoader's workers may import this file again
    learner_id = sys.argv[1]
    draw = torch.Generator().manual_seed(sum(learner_id.encode()))  # each learner has data of its own
    inputs = torch.randn(BATCHES * BATCH_SIZE, 16, generator=draw)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, num_workers=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    planned = 2 * EPOCHS * BATCHES * BATCH_SIZE  # of both learners
    with Learner(
        model, target=TARGET, run="plain", learner_id=learner_id, create=True, planned_token_count=planned
    ) as learner:
        for epoch in range(EPOCHS):
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=len(inputs), loss=loss.item())
            print(f"epoch {epoch + 1}, loss {loss.item():.3f}, versions {dict(learner.stats.versions)}")
