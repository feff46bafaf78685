"""A learner of a torch module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from skerry.client.array_learner import ArrayLearner
from skerry.client.session import Adoption
from skerry.client.torch_parameters import TorchParameters
from skerry.runtime.tls import Tls
from skerry.wire.policy import Policy


class Learner(ArrayLearner):
    """Trains a torch module together with the other learners of a run.

        with Learner(model, target="syncer.example:443", run="gemma-12b", learner_id="us-east") as learner:
            for batch in loader:
                loss = model(**batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                learner.step(tokens=batch["input_ids"].numel())      # returns at once

    Args:
        model: a module, of which the trainable floating-point parameters take part (tied ones once; names without the
            wrappers DistributedDataParallel, DataParallel and torch.compile), or tensors by name. Their storage must
            stay what it is: move the model to its device first.

    The other arguments, and everything else, are as `ArrayLearner` says.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        target: str,
        run: str,
        learner_id: str | None = None,
        region: str = "",
        create: bool = False,
        policy: Policy | None = None,
        planned_step_count: int | None = None,
        adoption: Adoption | str = Adoption.REBASE,
        blend_alpha: float = 0.5,
        fragment_count: int | None = None,
        connect_timeout_s: float = 30.0,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(
            TorchParameters(model),
            target=target,
            run=run,
            learner_id=learner_id,
            region=region,
            create=create,
            policy=policy,
            planned_step_count=planned_step_count,
            adoption=adoption,
            blend_alpha=blend_alpha,
            fragment_count=fragment_count,
            connect_timeout_s=connect_timeout_s,
            tls=tls,
        )


def attach(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    tokens_per_step: int | Callable[[], int],
    **options: Any,
) -> Learner:
    """Returns a learner that counts every step of `optimizer`, so that the training loop needs no other line.

        learner = attach(model, optimizer, tokens_per_step=32 * 1024, target="syncer.example:443", run="gemma-12b")
        ...                                                  # the training loop as it is
        learner.leave()                                      # or: with attach(...): around the loop

    A step of the run is a step of the optimizer: micro-batches that are accumulated are part of one, and a step that
    GradScaler skips is none. Weights may change when the optimizer's `step` returns. Attach once the model is on its
    device and has its checkpoint.

    Args:
        model: as `Learner` says.
        optimizer: the optimizer of the model's parameters, or a wrapper that has it as its attribute `optimizer`, as
            those of accelerate and Lightning do. Where several optimizers train the model, the one that steps last.
        tokens_per_step: what this island trains on in one step, by which its work is weighed against the others':
            tokens, or examples if all learners of the run count them; or a function that returns it, called at each
            step.
        **options: as `Learner` says, `target` and `run` among them. State `planned_step_count` in optimizer steps.

    Raises:
        SkerryError, ValueError: as `Learner`; or the optimizer has none of the model's parameters.
    """
    inner = _unwrapped(optimizer)
    parameters = model.parameters() if isinstance(model, torch.nn.Module) else model.values()
    if {id(one) for group in inner.param_groups for one in group["params"]}.isdisjoint(map(id, parameters)):
        raise ValueError(
            "the optimizer trains none of the model's parameters. Make it after the model is moved and converted, from "
            "this model's parameters()"
        )
    return _Attached(model, inner, tokens_per_step if callable(tokens_per_step) else lambda: tokens_per_step, **options)


class _Attached(Learner):
    """A learner that steps with an optimizer."""

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        optimizer: torch.optim.Optimizer,
        count_tokens: Callable[[], int],
        **options: Any,
    ) -> None:
        super().__init__(model, **options)

        def stepped(*_: object) -> None:
            self.step(count_tokens())

        self._closing.callback(optimizer.register_step_post_hook(stepped).remove)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer whose `step` changes the weights."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer
