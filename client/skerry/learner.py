"""A learner of a torch module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, ParamSpec, TypeVar, Unpack
from weakref import WeakSet

import torch
from torch import distributed

from skerry.array_learner import ArrayLearner, LearnerOptions, SingleProcess, settings_of
from skerry.errors import SkerryError
from skerry.exchange.settings import whole_number
from skerry.model.torch.parameters import CopyOf, TorchParameters
from skerry.model.torch.watch import reshard
from skerry.ranks.island import process_group_of
from skerry.ranks.member import ManyRanks
from skerry.runtime.logs import get_logger

P = ParamSpec("P")
R = TypeVar("R")

_log = get_logger(__name__)

# Those that have not left: their hooks and threads keep them alive.
_LEARNERS: Final[WeakSet[Learner]] = WeakSet()


class TorchOptions(LearnerOptions, total=False):
    """The arguments of a learner of a torch module, which `Learner` explains."""

    copies: CopyOf | None
    process_group: distributed.ProcessGroup | None


class Learner(ArrayLearner):
    """Trains a torch module together with the other learners of a run.

        with Learner(model, target="syncer.example:443", run="gemma-12b", learner_id="us-east") as learner:
            for batch in loader:
                loss = model(**batch).loss
                loss.backward(); optimizer.step(); optimizer.zero_grad()
                learner.step(tokens=batch["input_ids"].numel())      # returns at once

    Args:
        model: a module, of which the trainable floating-point parameters take part (once where they are tied or
            share their memory; names without the wrappers DistributedDataParallel, DataParallel and torch.compile), or
            tensors by name. Their storage must stay what it is: move the model to its device first. Frozen parameters
            have to be the same on all learners, which is checked when a learner attaches. Buffers are not synchronised,
            and a warning names them. If the model has a learner already, that one sends its last work and leaves first.
        copies: where the optimizer keeps weights of its own and writes them over the model's, a function that returns
            its copy of a parameter, or None if it has none yet: `lambda weight: optimizer.state[weight].get("z")`.
            Versions of the run are added to copies as well. Float32 masters, Lookahead's slow weights and the z of
            schedule-free optimizers are such copies; moments and averages that are only read are not.
        process_group: the ranks that train the model together (DistributedDataParallel, `fully_shard`, tensor
            parallelism): one learner, each fragment of which one rank exchanges. By default all ranks, if
            torch.distributed is initialised.

    The other arguments, and everything else, are as `ArrayLearner` says. With several ranks, every rank makes a Learner
    and makes the same calls in the same order. Each gives its own tokens and loss to `step`, which waits for the other
    ranks. What it returns and all properties say the same at every rank, as of the end of the last call;
    `merged_weights` is what the first rank returns, and empty at the others. If one rank fails, the others raise an
    error at their next call; no rank can go on without the others. Their last work is sent if all leave after the same
    step and within 5 s, by Ctrl-C, `sys.exit` or `leave_soon`; otherwise the first rank warns of the steps that are
    lost.

    Raises:
        StopExchangingError: RANK_LEFT: another rank failed or made no Learner in `connect_timeout_s`. RANKS_DIFFER: the
            ranks do not do the same.
    """

    def __init__(
        self,
        model: torch.nn.Module | Mapping[str, torch.Tensor],
        *,
        copies: CopyOf | None = None,
        process_group: distributed.ProcessGroup | None = None,
        **options: Unpack[LearnerOptions],
    ) -> None:
        # The weights are watched by their addresses, which only a step that torch.compile does not trace sees.
        self._step = _untraced(super().step)
        settings_of(**options)
        group = process_group_of(model, process_group)
        self.trained_ids: Final = {id(tensor) for tensor in _tensors_of(model)}
        _leave_earlier(self.trained_ids)
        self.look_again: Callable[[], None] = lambda: None  # before a step, at weights that were loaded
        if group is None:
            parameters = TorchParameters(model, copies)
            try:
                parameters.check_in_memory()
                parameters.check_whole()
                self._begin(SingleProcess(parameters, options))
            except BaseException:
                parameters.release()
                raise
            self.when_left(parameters.release)
            self.look_again = parameters.look_again
        else:
            self._begin(ManyRanks(group, model, options, copies=copies))
        _LEARNERS.add(self)
        self.when_left(lambda: _LEARNERS.discard(self))

    def step(self, tokens: int, loss: float | None = None) -> tuple[str, ...]:
        """As `ArrayLearner.step`. It may be inside of what torch.compile compiles, where it breaks the graph."""
        return self._step(tokens, loss)


def _tensors_of(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterable[torch.Tensor]:
    return model.parameters() if isinstance(model, torch.nn.Module) else model.values()


def _leave_earlier(trained_ids: Collection[int]) -> None:
    """Has learners of the same tensors leave: as a cell of a notebook is run again, the first one is still there."""
    for earlier in [learner for learner in _LEARNERS if not learner.trained_ids.isdisjoint(trained_ids)]:
        _log.warning("the model has a learner already, which leaves its run", steps=earlier.stats.step_count)
        try:
            earlier.leave()
        except SkerryError as error:
            _log.warning("the earlier learner's last steps are not in its run", because=str(error))
            earlier.close()


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that torch.compile leaves as it is, and breaks its graph for."""
    untraced: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return untraced


def attach(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    tokens_per_step: int | Callable[[], int],
    **options: Unpack[TorchOptions],
) -> Learner:
    """Returns a learner that counts every step of `optimizer`, so that the training loop needs no other line.

        learner = attach(model, optimizer, tokens_per_step=32 * 1024, target="syncer.example:443", run="gemma-12b")
        ...                                                  # the training loop as it is
        learner.leave()                                      # or: with attach(...): around the loop

    A step of the run is a step of the optimizer: micro-batches that are accumulated are part of one, and a step that
    GradScaler skips is none. (With a fused optimizer only the device knows that, and is waited for, as GradScaler does
    with others.) Weights may change when the optimizer's `step` returns. Attach once the model is on its device and has
    its checkpoint.

    Args:
        model: as `Learner` says.
        optimizer: the optimizer of the model's parameters, or a wrapper that has it as its attribute `optimizer`, as
            those of accelerate and Lightning do. Where several optimizers train the model, the one that steps last.
        tokens_per_step: what this process trains on in one step, by which the learner's work is weighed against the
            others': tokens, or examples if all learners of the run count them; a whole number, or a function that
            returns it, called at each step. An island of several ranks adds up its ranks'.
        **options: as `Learner` says, `target` and `run` among them.

    Raises:
        SkerryError, ValueError: as `Learner`; or `tokens_per_step` is below 1, or the optimizer has none of the model's
            parameters.
    """
    count_tokens = token_counter(tokens_per_step)
    reshard(model)
    inner = _unwrapped(optimizer)
    if {id(weight) for group in inner.param_groups for weight in group["params"]}.isdisjoint(
        map(id, _tensors_of(model))
    ):
        raise ValueError(
            "the optimizer trains none of the model's parameters. Make it after the model is moved and converted, from "
            "this model's parameters()"
        )
    learner = Learner(model, **options)
    has_gpu = torch.cuda.is_available()

    def stepped(stepping: torch.optim.Optimizer, *_: object) -> None:
        if has_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the optimizer's step is captured in a CUDA graph, whose replays would count no step: make a Learner "
                "in place of attach(), and call its step() after each replay"
            )
        # Of a fused optimizer GradScaler leaves it to the device whether the step is skipped.
        if (found_inf := getattr(stepping, "found_inf", None)) is None or not found_inf.item():
            learner.step(count_tokens())

    for hook in (
        inner.register_step_pre_hook(_untraced(lambda *_: learner.look_again())),
        inner.register_step_post_hook(_untraced(stepped)),
    ):
        learner.when_left(hook.remove)
    return learner


def token_counter(tokens_per_step: int | Callable[[], int]) -> Callable[[], int]:
    """Returns a function that returns the tokens of a step.

    Raises:
        ValueError: `tokens_per_step` is neither such a function nor a whole number of at least 1.
    """
    if callable(tokens_per_step):
        return tokens_per_step
    token_count = whole_number(tokens_per_step, "tokens_per_step")
    if token_count < 1:
        raise ValueError(f"tokens_per_step must be at least 1. tokens_per_step={token_count}")
    return lambda: token_count


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer whose `step` changes the weights."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer
