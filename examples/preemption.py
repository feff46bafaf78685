"""A machine that may be taken away: on SIGTERM the step is finished, its work is sent, and the program ends."""

import os
import signal
import sys
import threading

import torch
from torch import nn

from skerry.client import Learner

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")

learner_id = sys.argv[1]
told_to_end = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())

draw = torch.Generator().manual_seed(sum(learner_id.encode()))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with Learner(model, target=TARGET, run="preemption", learner_id=learner_id, create=True) as learner:
    while not told_to_end.is_set():
        inputs = torch.randn(32, 16, generator=draw)
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        learner.step(tokens=len(inputs), loss=loss.item())
    # Leaving sends what is unsent, for at most 10 s, and says goodbye, so that no round waits for this learner.
print(f"ended after step {learner.stats.step_count}; steps not sent: {learner.stats.unsent_step_count}")
