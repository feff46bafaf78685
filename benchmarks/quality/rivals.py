"""What islands are measured against: one place, one island alone, and DiLoCo that waits."""

from __future__ import annotations

import torch

from benchmarks.quality import task
from benchmarks.quality.arms import DataParallel, Outcome, Synchronous


def train_data_parallel(arm: DataParallel, seed: int) -> Outcome:
    """Trains one model on all learners' batches at once."""
    inner = task.Inner(arm.peak_rate, arm.step_count, arm.optimizer, arm.rank, arm.task)
    training = task.InnerTraining(inner, seed=seed)
    parts, batch_size = arm.shard_count or arm.learner_count, arm.batch_size
    samplers = [
        task.sampler(n, parts, seed=seed, task=arm.task, data=arm.data, batch_size=batch_size)
        for n in range(arm.part, arm.part + arm.learner_count)
    ]
    for step in range(arm.step_count):
        training.step(task.joined([sampler.batch(step) for sampler in samplers]), step)
    return Outcome({data: training.judge(data) for data in arm.judged_on or (arm.data,)}, (arm.step_count,))


def train_synchronous(arm: Synchronous, seed: int) -> Outcome:
    """Trains replicas that all merge at once every H steps.

    Source: DiLoCo (arXiv 2311.08105), algorithm 1; outer SGD with Nesterov momentum as torch has it.
    """
    inner = task.Inner(arm.peak_rate, arm.step_count, task=arm.task)
    count = arm.learner_count
    replicas = [task.InnerTraining(inner, seed=seed) for _ in range(count)]
    samplers = [task.sampler(n, count, seed=seed, task=arm.task, data=arm.data) for n in range(1, count + 1)]
    anchor = [parameter.detach().clone() for parameter in replicas[0].model.parameters()]
    for parameter in anchor:
        parameter.grad = torch.zeros_like(parameter)
    outer = torch.optim.SGD(anchor, lr=arm.outer_rate, momentum=arm.outer_momentum, nesterov=arm.outer_momentum > 0)
    number = 0
    for step in range(arm.step_count):
        for replica, sampler in zip(replicas, samplers, strict=True):
            replica.step(sampler.batch(step), step)
        if (step + 1) % arm.inner_step_count == 0 or step + 1 == arm.step_count:
            number += 1
            outer.param_groups[0]["momentum"] = _momentum(arm, number)
            _synchronise(anchor, replicas, outer, arm.merge)
    return Outcome({arm.data: replicas[0].judge(arm.data)}, (arm.step_count,) * count)


def _momentum(arm: Synchronous, number: int) -> float:
    """Returns the momentum of round `number`, from 1."""
    momentum = arm.outer_momentum
    if arm.ramp:
        momentum = min(momentum, number / (number + arm.ramp))
    if arm.settling:
        left = 1 - (number - 1) * arm.inner_step_count / arm.step_count
        momentum *= min(1.0, left / arm.settling)
    return momentum


@torch.no_grad()
def _synchronise(
    anchor: list[torch.Tensor], replicas: list[task.InnerTraining], outer: torch.optim.Optimizer, merge: str
) -> None:
    for index, weights in enumerate(anchor):
        local = [list(replica.model.parameters())[index] for replica in replicas]
        deltas = torch.stack([weights - one for one in local])
        mean = deltas.mean(dim=0)
        if merge == "rda":
            norms = deltas.flatten(1).norm(dim=1).clamp_min(1e-30)
            direction = (deltas / norms.view(-1, *[1] * weights.ndim)).mean(dim=0)
            mean = direction * (norms.mean() / direction.norm().clamp_min(1e-30))
        assert weights.grad is not None
        weights.grad.copy_(mean)
    outer.step()
    for index, weights in enumerate(anchor):
        for replica in replicas:
            list(replica.model.parameters())[index].copy_(weights)
