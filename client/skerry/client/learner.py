"""A learner of a torch module."""

from __future__ import annotations

from collections.abc import Mapping

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
            stay what it is: move the model to its device first. Frozen parameters have to be the same on all learners,
            which is checked when a learner attaches. Buffers are not synchronised, and a warning names them.

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
        allow_other_frozen: bool = False,
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
            allow_other_frozen=allow_other_frozen,
            connect_timeout_s=connect_timeout_s,
            tls=tls,
        )
