"""Watches a run, and takes its merged weights into a model whenever all of it is new: to evaluate it, for example.

`python examples/watch.py plain 3`: three times, of the run that examples/plain.py makes, whose model it has.
"""

import os
import sys

import torch
from torch import nn

from skerry import RunsClient
from skerry.v1.types_pb2 import Event

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")

run, times = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
inputs = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))

with RunsClient(TARGET) as client:
    waiting = {fragment.name for fragment in client.get_run(run).run.fragments}
    new = set[str]()
    for seen in client.watch(run, after_position=1):  # from its beginning; without after_position: from now on
        if not isinstance(seen, Event) or not seen.HasField("version_committed"):
            continue
        version = seen.version_committed.version
        print(f"{version.fragment} has version {version.version}")
        new.add(version.fragment)
        if new == waiting:
            new = set()
            model.load_state_dict({name: torch.from_numpy(values) for name, values in client.pull(run)})
            loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
            print(f"merged model: loss {loss.item():.3f}")
            times -= 1
        if times == 0:
            break
