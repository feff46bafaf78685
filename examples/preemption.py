"""A machine that may be taken away: on SIGTERM the step is finished, its work is sent, and the program ends.

`python examples/preemption.py us`, with the learner's id.
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from skerry import Learner, leave_on_signal

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")

if __name__ == "__main__":  # a DataLoader's workers may import this file again
    learner_id = sys.argv[1]
    data = torch.randn(3200, 16, generator=torch.Generator().manual_seed(sum(learner_id.encode())))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    learner = Learner(model, target=TARGET, run="preemption", learner_id=learner_id, create=True)
    leave_on_signal(learner)
    try:
        with learner:
            while True:
                for (inputs,) in DataLoader(TensorDataset(data), batch_size=32, shuffle=True, num_workers=2):
                    loss = nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    learner.step(tokens=len(inputs), loss=loss.item())  # after SIGTERM it raises SystemExit
            # Leaving sends what is unsent, for at most 10 s, and says goodbye: no round waits for this learner.
    finally:
        print(f"ended after step {learner.stats.step_count}; steps not sent: {learner.stats.unsent_step_count}")
