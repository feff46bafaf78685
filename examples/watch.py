"""Follows a run, and evaluates its merged weights while learners train.

`python examples/watch.py plain 3`: three times, of the run that examples/plain.py makes, whose model it has.
"""

import itertools
import os
import sys

import torch
from torch import nn

from skerry import Follower

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")

run, times = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
inputs = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))

with Follower(TARGET, run, every=4) as follower:
    for version in itertools.islice(follower, times):
        model.load_state_dict(version.state_dict())
        loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        print(f"merged model at position {version.position}: loss {loss.item():.3f}")
