"""Notices weights that something other than training has replaced, moved or written over.

What takes part is decided by the attached tensors alone: the model must still hold each of them, with its memory and
its type. Layers without parameters, and frozen parameters, may come and go.

A state dict that is loaded keeps the memory, so hooks of the module compare the values before and after.

An optimizer that keeps weights of its own writes them over what was adopted. After its next step a few weights of each
changed fragment are then close to where they were before the change; the steps of other optimizers leave the change in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from skerry.model.interface import Work
from skerry.model.torch.shards import local_part
from skerry.model.torch.untrained import checksum
from skerry.runtime.logs import get_logger

_log = get_logger(__name__)

# Modules that wrap a model in their attribute `module`.
_WRAPPERS: Final = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
# Tensors for each step between two looks at the model: a look takes milliseconds where there are ten times as many.
_LOOKED_AT: Final = 2**12
_SAMPLED: Final = 2**10  # weights of a fragment
_NAMED: Final = 3  # in a message
_ATTACH_LAST: Final = "do that first, then attach; the run's weights win"


class Watch:
    """The attached tensors of a model, by name, and what has become of them."""

    def __init__(
        self, model: torch.nn.Module | Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        self._model = model
        # With what reads the local part of a DTensor, and this part: its memory is not used again while it is kept.
        self._tensors = {
            id(tensor): (name, tensor, getattr(tensor, "to_local", None), local_part(tensor.detach()))
            for name, tensor in tensors.items()
        }
        self._trained_alone: set[int] = set()
        self._step_count = 0
        self._write_count: int | None = None  # up to the last step
        self._before_load: list[int] | None = None  # checksums, while loaded weights are not those that were trained
        self._loading: torch.nn.Module | None = None  # the outermost that is loaded just now
        # Some weights around each change since the last step, by fragment: tensor, places in it, before, after.
        self._changes: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        # How far the weights are from those before the change, and how far the change took them, by fragment.
        self._looks: dict[str, torch.Tensor] = {}
        self._has_warned = False
        self._handles: list[Any] = []
        for module in model.modules() if isinstance(model, torch.nn.Module) else ():
            before, after = _Hook(self._before_loading), _Hook(self._after_loading)
            self._handles += [
                module._register_load_state_dict_pre_hook(before, with_module=True),  # type: ignore[no-untyped-call]  # noqa: SLF001 - all of 2.4
                module.register_load_state_dict_post_hook(after),  # type: ignore[no-untyped-call]
            ]

    def release(self) -> None:
        """Takes the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def problem(self) -> str | None:
        """Returns what was replaced, and what to do; cheap, for every step."""
        problem = self._replaced()
        self._write_count = self._count_writes()
        self._look_at_changes()
        return problem

    def _replaced(self) -> str | None:
        number, self._step_count = self._step_count, self._step_count + 1
        if self._before_load is not None:
            return f"a state dict was loaded after attaching, which is not training: {_ATTACH_LAST}"
        if number % (1 + len(self._tensors) // _LOOKED_AT):
            return None
        held = {id(tensor): tensor for tensor in _held(self._model)}
        if not held.keys() >= self._tensors.keys():
            reshard(self._model)
            held = {id(tensor): tensor for tensor in _held(self._model)}
        with torch.no_grad():
            for key, (name, tensor, to_local, part) in self._tensors.items():
                if key not in held:
                    return f"a parameter or layer was replaced after attaching: {_ATTACH_LAST}. parameter={name}"
                now = tensor if to_local is None else to_local()
                if now.data_ptr() != part.data_ptr() or now.dtype is not part.dtype:
                    return f"the model was moved or converted after attaching: {_ATTACH_LAST}. parameter={name}"
        self._warn_of_others(held)
        return None

    def _warn_of_others(self, held: Mapping[int, torch.Tensor]) -> None:
        """Names parameters that have become trainable, once."""
        others = {
            key
            for key in held.keys() - self._tensors.keys() - self._trained_alone
            if held[key].requires_grad and (is_lazy(held[key]) or held[key].numel())
        }
        if others and isinstance(self._model, torch.nn.Module):
            self._trained_alone |= others
            _log.warning(
                "the model has trainable parameters that were not trainable, or not there, when it was attached. They "
                "are not in the run's plan, so this learner trains them alone. To train them with the others, begin a "
                "run of another name: attach while everything that will ever be trained is trainable, and freeze "
                "afterwards what is to be trained later",
                count=len(others),
                names=[name for name, tensor in self._model.named_parameters() if id(tensor) in others][:_NAMED],
            )

    # State dicts.

    def look_again(self) -> None:
        """Takes note of weights that were taken back after a state dict was loaded; before the next step."""
        if self._before_load is not None and self._before_load == self._checksums():
            self._before_load = None

    def _before_loading(self, module: torch.nn.Module, *_: object) -> None:
        """Keeps the checksums of weights that were trained; of averages in their place the values don't matter."""
        if self._loading is None:
            self._loading = module
            if self._before_load is None and self._write_count in {None, self._count_writes()}:
                self._before_load = self._checksums()

    def _after_loading(self, module: torch.nn.Module, *_: object) -> None:
        if self._loading is module:
            self._loading = None
            self.look_again()

    def _checksums(self) -> list[int]:
        return [int(checksum(part)) for *_, part in self._tensors.values()]

    def _count_writes(self) -> int:
        return _write_count(part for *_, part in self._tensors.values())

    # Changes by the exchange.

    def changing(self, fragment: str, tensors: Sequence[torch.Tensor], change: Work) -> Work:
        """Returns the change of a fragment's weights, with a look at some of them before and after."""
        plain = [tensor for tensor in tensors if type(tensor) is torch.Tensor]

        def work() -> None:
            write_count = _write_count(tensors)
            if plain:
                tensor = max(plain, key=torch.Tensor.numel)
                places = torch.arange(0, tensor.numel(), 1 + tensor.numel() // _SAMPLED, device=tensor.device)
                before = tensor.take(places).float()
                change()
                self._changes[fragment] = tensor, places, before, tensor.take(places).float()
            else:
                change()
            if self._write_count is not None:
                self._write_count += _write_count(tensors) - write_count

        return work

    def _look_at_changes(self) -> None:
        """Compares weights at the first step after a change; nobody waits for what a GPU finds."""
        for fragment, (tensor, places, before, after) in self._changes.items():
            if fragment in self._looks:
                self._warn_of_undone_changes()
            distances = torch.stack([(tensor.take(places).float() - before).norm(), (after - before).norm()])
            look = torch.full((2,), torch.nan, device="cpu", pin_memory=distances.is_cuda)
            self._looks[fragment] = look.copy_(distances, non_blocking=True)
        self._changes.clear()

    def _warn_of_undone_changes(self) -> None:
        """Looks at all fragments together, since a step of any optimizer may undo a small change by chance."""
        to_before, changed = torch.stack([*self._looks.values()]).norm(dim=0).tolist()
        self._looks.clear()
        # So the changes are larger than what rounding and the steps have done since; false of what is not copied yet.
        if to_before < changed / 2 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "the optimizer has written weights of its own over those of the run, so this learner takes from the "
                "run what others bring: give copies=, a function that returns the optimizer's copy of a parameter"
            )


def _write_count(tensors: Iterable[torch.Tensor]) -> int:
    """Returns how often the tensors were written to in place."""
    return sum(tensor._version for tensor in tensors)  # noqa: SLF001 - checksums take longer


class _Hook:
    """A hook that does nothing in copies of its module, nor in one that was saved, which loads without Skerry."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> None:
        """Calls what was given."""
        self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def _held(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yields the tensors that a model has now; named_parameters() takes four times as long."""
    if not isinstance(model, torch.nn.Module):
        yield from model.values()
        return
    modules = [model]
    while modules:
        module = modules.pop()
        yield from (tensor for tensor in module._parameters.values() if tensor is not None)  # noqa: SLF001 - as above
        modules += [child for child in module._modules.values() if child is not None]  # noqa: SLF001 - as above


def reshard(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Has fully_shard put shards back in the place of weights that a pass without gradients has left gathered."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        if hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]


def wrapped_attribute(module: torch.nn.Module) -> str | None:
    """Returns the attribute in which a wrapper has the module that it wraps; None where `module` is no wrapper."""
    if isinstance(module, _WRAPPERS):
        return "module"
    # Of torch.compile, by its name: importing torch._dynamo takes a second or more.
    return "_orig_mod" if type(module).__name__ == "OptimizedModule" else None
