"""What the ranks of an island with DistributedDataParallel do in the tests."""

from __future__ import annotations

import builtins
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from skerry import Learner, OuterOptimizer, Policy
from skerry.net import own_syncer
from skerry.wire import Codec, Encoding
from tests.integration.ranks.ranks import Rank, loss_of, network, weights_digest
from tests.support.heard_logs import heard_logs

POLICY = Policy(inner_step_count=3, lease_term_s=1.0)
# Deltas and updates lose nothing and are sent when the test says so. A version of a delta of zeros changes nothing.
EXACT = Policy(
    inner_step_count=10_000,
    lease_term_s=1.0,
    outer=OuterOptimizer(learning_rate=0.5, momentum=0.0),
    quarantine_ratio=0.0,
    delta_encoding=Encoding(Codec.FLOAT32),
    update_encoding=Encoding(Codec.FLOAT32),
)


def learner_of(model: nn.Module, rank: Rank, **options: Any) -> Learner:
    """Returns a learner of the one run of these tests."""
    given: dict[str, Any] = {
        "run": "theirs",
        "learner_id": "island",
        "create": True,
        "policy": POLICY,
        **options,
    }
    return Learner(model, target=rank.target, **given)


def train_until_version(rank: Rank, version: int, island_size: int) -> dict[str, Any]:
    """Trains with accumulated gradients until every fragment has a version; returns what every step left.

    The ranks of one torch world are islands of that size.
    """
    groups = [
        distributed.new_group([*range(first, first + island_size)]) for first in range(0, rank.count, island_size)
    ]
    number = rank.number // island_size
    model = nn.parallel.DistributedDataParallel(network(rank.number), process_group=groups[number])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps: list[Any] = []
    # The first island's group is that of its model.
    group: dict[str, Any] = {"process_group": groups[number]} if number else {}
    with learner_of(model, rank, learner_id=f"island-{number}", planned_token_count=10**6, **group) as learner:
        began = weights_digest(model)
        while min(learner.stats.versions.values()) < version:
            with model.no_sync():
                loss_of(model, len(steps), rank.number, 2 * rank.count).backward()
            loss_of(model, len(steps), rank.number + rank.count, 2 * rank.count).backward()
            optimizer.step()
            optimizer.zero_grad()
            changed = learner.step(tokens=10 + rank.number, loss=float(rank.number))
            stats = learner.stats
            steps.append((changed, weights_digest(model), stats.step_count, stats.token_count, stats.progress))
    return {"began": began, "steps": steps, "stats": learner.stats, "failure": learner.failure}


def train_over_store(rank: Rank) -> tuple[int, int]:
    """Sends deltas to a store; returns how many were acknowledged, and how many syncers this rank has started."""
    with learner_of(network(), rank) as learner:
        started = len(own_syncer._SYNCERS)
        for _ in range(POLICY.inner_step_count):
            learner.step(tokens=1)
        learner.leave(30)
        return learner.stats.deltas_acknowledged, started


def join(rank: Rank, options: Sequence[dict[str, Any] | None]) -> None:
    """Joins with the options of the rank's own; does not where it has none."""
    given = options[rank.number]
    if given is not None:
        learner_of(network(), rank, **given)


def fail(rank: Rank, how: str, who: int) -> None:
    """Trains without averaging; one rank fails after the third step in the given way."""
    model = network()
    is_it = rank.number == who
    with learner_of(model, rank) as learner:
        for count in range(10_000):
            time.sleep(0.002)  # a failure may have to wait for the next adoption
            if is_it and count == 3:
                _fail(how, model, learner)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * (1 + (is_it and how == "drift")))
            learner.step(tokens=-1 if is_it and how == "tokens" and count == 3 else 5)


def _fail(how: str, model: nn.Module, learner: Learner) -> None:
    if how == "error":
        raise ZeroDivisionError("a bad batch")
    if how == "flush":
        learner.flush(1.0)
    if how == "replaced":
        model.load_state_dict(network(1).state_dict())


def end(rank: Rank, endings: tuple[str, ...]) -> dict[str, Any]:
    """Trains 7 steps and leaves the context by an exception of that name; returns how, and what was said to be lost.

    With "leave" the rank is told to leave; one of fewer endings than there are ranks trains on.
    """
    model = network()
    learner = learner_of(model, rank)
    ending = endings[rank.number] if rank.number < len(endings) else ""
    begin_s = 0.0
    try:
        with heard_logs() as logs, learner:
            for count in range(1_000):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(0.01)
                if (count, ending) == (6, "leave"):
                    learner.leave_soon(143)
                learner.step(tokens=5)
                if count == 6 and ending not in ("", "leave"):
                    begin_s = time.monotonic()
                    raise getattr(builtins, ending)
    except BaseException as error:  # noqa: BLE001 - what is raised is told to the test
        kind, code = type(error).__name__, getattr(error, "code", None)
    return {
        "kind": kind,
        "code": code,
        "lost": [line for line in logs if "left the run, which does not have" in line["event"]],
        "steps": learner.stats.step_count,
        "unsent": learner.stats.unsent_step_count,
        "took_s": time.monotonic() - begin_s,
    }
