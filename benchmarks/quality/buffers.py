"""Which running statistics suit merged weights: `python -m benchmarks.quality.buffers`, a minute.

Four networks with batch normalisation learn what a random network says of inputs, which may be shifted and scaled for
each learner in its own way. Their weights are averaged every 24 steps. In the end the averaged weights are judged on
inputs of all four, in evaluation mode, with running statistics of several origins. docs/decisions/0009-buffers.md says
what follows from that. Nothing of the product runs here: it does not synchronise buffers.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.functional import cross_entropy

_LEARNER_COUNT: Final = 4
_INNER_STEP_COUNT: Final = 24
_ROUND_COUNT: Final = 25
_INPUTS: Final = 32
_WIDTH: Final = 64
_SEEDS: Final = range(5)
_SPREADS: Final = {"the same data": 0.0, "shifted and scaled data": 0.3}

Buffers = Mapping[str, torch.Tensor]


class Task:
    """Labels by a random network, for inputs that each learner sees in its own scale."""

    def __init__(self, seed: int, spread: float) -> None:
        torch.manual_seed(seed)
        layers = [layer for size in (_INPUTS, 128, 128) for layer in (nn.Linear(size, 128), nn.ReLU())]
        self._teacher = nn.Sequential(*layers, nn.Linear(128, 8)).requires_grad_(False)
        for parameter in self._teacher.parameters():
            parameter.mul_(2)
        self._shifts = spread * torch.randn(_LEARNER_COUNT, _INPUTS)
        self._scales = (spread * torch.randn(_LEARNER_COUNT, _INPUTS)).exp()

    def batch(self, learner: int, count: int, source: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `(count, 32)` inputs as the learner sees them, and their labels."""
        inputs = torch.randn(count, _INPUTS, generator=source) * self._scales[learner] + self._shifts[learner]
        return inputs, self._teacher(inputs).argmax(1)


def _network() -> nn.Module:
    layers: list[nn.Module] = []
    for size in (_INPUTS, _WIDTH, _WIDTH):
        layers += [nn.Linear(size, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, 8))


def _trained(task: Task, seed: int) -> tuple[nn.Module, list[nn.Module]]:
    """Returns the averaged weights, and the learners that they are of, which have trained on for a round."""
    merged = _network()
    learners = [copy.deepcopy(merged) for _ in range(_LEARNER_COUNT)]
    sources = [torch.Generator().manual_seed(1000 * seed + number) for number in range(_LEARNER_COUNT)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=3e-3) for one in learners]
    for _ in range(_ROUND_COUNT):
        for number, (learner, optimizer) in enumerate(zip(learners, optimizers, strict=True)):
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(merged.parameters()), learner.parameters())
            for _ in range(_INNER_STEP_COUNT):
                inputs, labels = task.batch(number, 64, sources[number])
                optimizer.zero_grad()
                torch.autograd.backward(cross_entropy(learner(inputs), labels))
                optimizer.step()
        weights = [nn.utils.parameters_to_vector(one.parameters()) for one in learners]
        nn.utils.vector_to_parameters(torch.stack(weights).mean(0), merged.parameters())
    return merged, learners


def _statistics(model: nn.Module) -> Buffers:
    return {name: one for name, one in model.named_buffers() if one.is_floating_point()}


def _with_statistics(model: nn.Module, given: Buffers) -> nn.Module:
    changed = copy.deepcopy(model)
    for name, buffer in _statistics(changed).items():
        buffer.copy_(given[name])
    return changed


def _estimated_anew(model: nn.Module, task: Task, learners: Sequence[int]) -> nn.Module:
    source = torch.Generator().manual_seed(7)
    changed = copy.deepcopy(model)
    batches = [task.batch(learners[number % len(learners)], 64, source)[0] for number in range(48)]
    torch.optim.swa_utils.update_bn(batches, changed)
    return changed


def _loss(model: nn.Module, task: Task) -> float:
    """Returns the mean loss on 1000 inputs of each learner."""
    source = torch.Generator().manual_seed(99)
    model.eval()
    losses = []
    for number in range(_LEARNER_COUNT):
        inputs, labels = task.batch(number, 1000, source)
        losses.append(float(cross_entropy(model(inputs), labels)))
    return statistics.mean(losses)


@torch.no_grad()
def _judged(task: Task, merged: nn.Module, learners: Sequence[nn.Module]) -> dict[str, float]:
    own = [_statistics(one) for one in learners]
    mean = {name: torch.stack([one[name] for one in own]).mean(0) for name in own[0]}
    everyone = range(_LEARNER_COUNT)
    anew = [_loss(_estimated_anew(merged, task, [number]), task) for number in everyone]
    return {
        "estimated anew from everybody's data": _loss(_estimated_anew(merged, task, everyone), task),
        "the mean of all learners'": _loss(_with_statistics(merged, mean), task),
        "one learner's": statistics.mean(_loss(_with_statistics(merged, one), task) for one in own),
        "estimated anew from one learner's data": statistics.mean(anew),
    }


def main() -> None:
    """Prints the table: percent over the first row, with 95 % intervals."""
    for name, spread in _SPREADS.items():
        found = []
        for seed in _SEEDS:
            task = Task(seed, spread)
            found.append(_judged(task, *_trained(task, seed)))
        print(name)
        for origin in found[0]:
            over = [100 * (one[origin] / next(iter(one.values())) - 1) for one in found]
            half = 2.78 * statistics.stdev(over) / len(over) ** 0.5  # Student's t of 5 seeds
            print(f"  {origin:40} {statistics.mean(over):+5.1f} ± {half:.1f} %")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
