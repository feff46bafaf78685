"""A learner of a torch module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, ParamSpec, TypeVar
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

from skerry.array_learner import EXIT_FLUSH_TIMEOUT_S, ArrayLearner, checked_settings
from skerry.errors import SkerryError
from skerry.exchange.session import Adoption, LastWork, Stats, whole_number
from skerry.model.interface import Parameters
from skerry.model.torch.parameters import CopyOf, TorchParameters, reshard
from skerry.net.grpc_transport import GrpcTransport
from skerry.net.tls import Insecure, Tls
from skerry.ranks import account as island_account
from skerry.ranks.island import Island, process_group_of
from skerry.ranks.member import IslandMember, View
from skerry.runtime.identifiers import system_random
from skerry.runtime.logs import get_logger
from skerry.wire.policy import Policy

P = ParamSpec("P")
R = TypeVar("R")

_log = get_logger(__name__)

# Those that have not left: their hooks and threads keep them alive.
_LEARNERS: Final[WeakSet[Learner]] = WeakSet()


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
            parallelism): one learner, of which the first rank exchanges for all. By default all ranks, if
            torch.distributed is initialised.

    The other arguments, and everything else, are as `ArrayLearner` says. With several ranks, every rank makes a Learner
    and makes the same calls in the same order. Each gives its own tokens and loss to `step`, which waits for the other
    ranks. What it returns and all properties say the same at every rank, as of the end of the last call. If one rank
    fails, the others raise an error at their next call; no rank can go on without the others.

    Raises:
        StopExchangingError: RANK_LEFT: another rank failed or made no Learner in `connect_timeout_s`. RANKS_DIFFER: the
            ranks do not do the same.
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
        allow_other_frozen: bool | Collection[str] = False,
        connect_timeout_s: float = 30.0,
        tls: Tls | Insecure | None = None,
        copies: CopyOf | None = None,
        process_group: distributed.ProcessGroup | None = None,
    ) -> None:
        options: dict[str, Any] = {
            "target": target,
            "run": run,
            "learner_id": learner_id,
            "region": region,
            "create": create,
            "policy": policy,
            "planned_step_count": planned_step_count,
            "adoption": adoption,
            "blend_alpha": blend_alpha,
            "fragment_count": fragment_count,
            "allow_other_frozen": allow_other_frozen,
            "connect_timeout_s": connect_timeout_s,
            "tls": tls,
        }
        # The weights are watched by their addresses, which only a step that torch.compile does not trace sees.
        self._step = _untraced(self._count_step)
        self._member: IslandMember | None = None
        self._has_agreed = False  # all ranks leave after this step
        self._leave_status = None
        self._last_work = LastWork()
        checked_settings(**options)
        group = process_group_of(model, process_group)
        self._look_again: Callable[[], None] = lambda: None
        self.trained_ids: Final = {id(one) for one in _tensors_of(model)}
        _leave_earlier(self.trained_ids)
        if group is None:
            parameters = TorchParameters(model, copies)
            try:
                parameters.check_in_memory()
                parameters.check_whole()
                super().__init__(parameters, **options)
            except BaseException:
                parameters.release()
                raise
            self._closing.callback(parameters.release)
            self._look_again = parameters.look_again
            _LEARNERS.add(self)
            return

        def join(parameters: Parameters) -> ArrayLearner:
            return ArrayLearner(parameters, **options)

        def open_transport() -> GrpcTransport:
            return GrpcTransport(target, tls=tls, jitter=system_random())

        self._closing = ExitStack()
        island = Island(group, timeout_s=connect_timeout_s)
        self._member = IslandMember(
            island,
            model,
            join,
            _view_of,
            open_transport,
            name=f"{run} {learner_id}",
            allow_other_frozen=allow_other_frozen,
            copies=copies,
        )
        _LEARNERS.add(self)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Sends the last work within 10 s and leaves the run, also when the process was told to end.

        Several ranks send their last work if all of them leave after the same step and within 5 s, by Ctrl-C,
        `sys.exit` or `leave_soon`. Otherwise nothing is sent, and the first rank warns of the steps that are lost.
        """
        if self._member is None or kind is None or self._has_agreed:
            super().__exit__(kind, *details)
        elif issubclass(kind, SystemExit | KeyboardInterrupt) and self._member.have_all_left(kind.__name__):
            self.leave()
        else:
            self._member.close(*details[:1])
            self.close()

    def step(self, tokens: int, loss: float | None = None) -> tuple[str, ...]:
        """As `ArrayLearner.step`. It may be inside of what torch.compile compiles, where it breaks the graph."""
        return self._step(tokens, loss)

    def _count_step(self, tokens: int, loss: float | None) -> tuple[str, ...]:
        if self._member is None:
            return super().step(tokens, loss)
        changed, status = self._member.step(tokens, loss, self._leave_status)
        if status is not None:
            self._has_agreed = True
            raise SystemExit(status)
        return changed

    def flush(self, timeout_s: float, *, is_last: bool = False) -> bool:
        """As `ArrayLearner.flush`."""
        if self._member is None:
            return super().flush(timeout_s, is_last=is_last)
        return self._member.flush(timeout_s, is_last=is_last)

    def leave(self, timeout_s: float = EXIT_FLUSH_TIMEOUT_S, *, load_merged: bool = False) -> LastWork:
        """As `ArrayLearner.leave`. With several ranks, every rank calls it, with the same arguments."""
        if self._member is None:
            return super().leave(timeout_s, load_merged=load_merged)
        try:
            return self._member.leave(timeout_s, load_merged=load_merged)
        finally:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """As `ArrayLearner.state_dict`, of tensors and plain values: torch.load reads it with `weights_only=True`.

        With several ranks, the first one returns it and the others an empty dictionary if each holds the whole model.
        With `fully_shard` and tensor parallelism each returns a share of it, for a file of its own.
        """
        state: dict[str, Any] = _with_tensors(
            super().state_dict() if self._member is None else self._member.state_dict()
        )
        return state

    def load_state_dict(
        self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], *, drop_incomplete: bool = False
    ) -> None:
        """As `ArrayLearner.load_state_dict`, also of what another number of ranks has saved, in whatever layout.

        Give what was saved as shares as a list. With several ranks, each gives what it has read, which may be nothing
        or what others have too; together they need every share. Where there is none at all a warning says so.

        With `drop_incomplete` a warning says so, too, if a share is missing or they were not saved together, as after a
        kill while ranks were saving, and the model keeps the run's weights.

        Raises:
            ValueError: also if a share is missing, or they were not saved together.
        """
        states = [state] if isinstance(state, Mapping) else state
        if self._member is not None:
            self._member.load_state_dict(states, drop_incomplete=drop_incomplete)
        elif (account := island_account.joined(states, drop_incomplete=drop_incomplete)) is not None:
            super().load_state_dict(account)

    def count_from(self, step_count: int, token_count: int) -> None:
        """As `ArrayLearner.count_from`."""
        if self._member is None:
            super().count_from(step_count, token_count)
        else:
            self._member.count_from(step_count, token_count)

    def merged_weights(self) -> dict[str, NDArray[np.float32]]:
        """As `ArrayLearner.merged_weights`. With several ranks, the first one returns them, and the others nothing.

        The others need not call it. Weights that no rank has whole are gathered, which needs the other ranks.

        Raises:
            StopExchangingError: RANK_LEFT: they are no longer there, or the learner has left.
        """
        return super().merged_weights() if self._member is None else self._member.merged_weights()

    def close(self) -> None:
        """As `ArrayLearner.close`."""
        _LEARNERS.discard(self)
        if self._member is None:
            super().close()
        else:
            self._member.close()
            self._closing.close()

    @property
    def stats(self) -> Stats:
        """As `ArrayLearner.stats`."""
        return super().stats if self._member is None else self._member.view.stats

    @property
    def progress(self) -> float | None:
        """As `ArrayLearner.progress`."""
        return super().progress if self._member is None else self._member.view.progress

    @property
    def planned_step_count(self) -> int:
        """As `ArrayLearner.planned_step_count`."""
        return super().planned_step_count if self._member is None else self._member.view.planned

    @property
    def is_closed(self) -> bool:
        """As `ArrayLearner.is_closed`."""
        return super().is_closed if self._member is None else self._member.view.is_closed

    @property
    def failure(self) -> SkerryError | None:
        """As `ArrayLearner.failure`."""
        return super().failure if self._member is None else self._member.view.failure


def _tensors_of(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterable[torch.Tensor]:
    return model.parameters() if isinstance(model, torch.nn.Module) else model.values()


def _leave_earlier(trained_ids: Collection[int]) -> None:
    """Has learners of the same tensors leave: as a cell of a notebook is run again, the first one is still there."""
    for earlier in [one for one in _LEARNERS if not one.trained_ids.isdisjoint(trained_ids)]:
        _log.warning("the model has a learner already, which leaves its run", steps=earlier.stats.step_count)
        try:
            earlier.leave()
        except SkerryError as error:
            _log.warning("the earlier learner's last steps are not in its run", because=str(error))
            earlier.close()


def _with_tensors(values: Any) -> Any:
    """Returns a state with its arrays as tensors, which share their memory."""
    if isinstance(values, dict):
        return {key: _with_tensors(value) for key, value in values.items()}
    return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that torch.compile leaves as it is, and breaks its graph for."""
    untraced: Callable[P, R] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return untraced


def _view_of(one: ArrayLearner) -> View:
    return View(one.stats, one.progress, one.planned_step_count, one.is_closed, one.failure)


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
        **options: as `Learner` says, `target` and `run` among them. State `planned_step_count` in optimizer steps.

    Raises:
        SkerryError, ValueError: as `Learner`; or `tokens_per_step` is below 1, or the optimizer has none of the model's
            parameters.
    """
    count_tokens = token_counter(tokens_per_step)
    reshard(model)
    inner = _unwrapped(optimizer)
    if {id(one) for group in inner.param_groups for one in group["params"]}.isdisjoint(map(id, _tensors_of(model))):
        raise ValueError(
            "the optimizer trains none of the model's parameters. Make it after the model is moved and converted, from "
            "this model's parameters()"
        )
    return _Attached(model, inner, count_tokens, **options)


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
        has_gpu = torch.cuda.is_available()

        def stepped(stepping: torch.optim.Optimizer, *_: object) -> None:
            if has_gpu and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "the optimizer's step is captured in a CUDA graph, whose replays would count no step: make a "
                    "Learner in place of attach(), and call its step() after each replay"
                )
            # Of a fused optimizer GradScaler leaves it to the device whether the step is skipped.
            if (found_inf := getattr(stepping, "found_inf", None)) is None or not found_inf.item():
                self.step(count_tokens())

        self._hooks = (
            optimizer.register_step_pre_hook(_untraced(lambda *_: self._look_again())),
            optimizer.register_step_post_hook(_untraced(stepped)),
        )

    def close(self) -> None:
        """As `Learner.close`; the optimizer is free for another learner."""
        for hook in self._hooks:
            hook.remove()
        super().close()


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer whose `step` changes the weights."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer
