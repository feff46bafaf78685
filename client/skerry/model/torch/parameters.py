"""The weights of a torch module, on the CPU or on a GPU, as the exchange reads and writes them.

Flat vectors are NumPy arrays on the CPU, and tensors on any other device: deltas are quantised on the device, and only
codes and scales are copied to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from skerry.algorithm.rebase import FlatArray
from skerry.errors import StopExchangingError
from skerry.model.interface import UNLIMITED, EncodeFrames, Work, tied
from skerry.model.torch.shards import local_part, region_of
from skerry.model.torch.untrained import (
    FrozenPart,
    checksum,
    frozen_parts,
    is_readable,
    persistent_buffers,
    untrained_tensors,
)
from skerry.model.torch.watch import Watch, reshard, wrapped_attribute
from skerry.runtime.vectors import vector
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.frames import encode_frames
from skerry.wire.torch_codecs import encode_frames_torch
from skerry.wire.untrained import UntrainedTensor

_DTYPES: Final = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
# Elements that are copied to a GPU at once, by way of pinned memory: 16 MiB.
_STAGED_NUMEL: Final = 2**22
# Returns the copy of a parameter that the optimizer keeps, or None if it has none, or none yet.
CopyOf: TypeAlias = Callable[[torch.Tensor], torch.Tensor | None]


class TorchParameters:
    """A module's trainable floating-point parameters, tied ones once, in whatever way, under their own names.

    A parameter's own name is its path of attributes without those of DistributedDataParallel, DataParallel and
    torch.compile, so that learners with and without them can be in one run. Tensors given by name keep their names.

    Of a DTensor this is the part that this process holds. Layouts then have the shapes of `regions`.

    Raises:
        ValueError: nothing can be trained, a trainable parameter is of a kind that can't be, two parameters have one
            name or share a part of their memory, they are on more than one device, or a DTensor is cut in a way that
            `region_of` does not know.
        TypeError: what is given by name is no tensor.
    """

    moving_limit = UNLIMITED

    def __init__(self, model: torch.nn.Module | Mapping[str, torch.Tensor], copies: CopyOf | None = None) -> None:
        """`copies` returns the optimizer's copy of a parameter, which changes with it."""
        reshard(model)
        self._copy_of = copies
        is_module = isinstance(model, torch.nn.Module)
        named = _own_names(model, model.named_parameters()) if isinstance(model, torch.nn.Module) else model
        attached = _trainable(named, are_all=not is_module)
        places = _places(named)
        attached_places = {name: place for name, place in places.items() if name in attached}
        names = tied(attached_places)
        self._trained = trained = {name: tensor for name, tensor in attached.items() if name not in names}
        self._tensors = {name: local_part(tensor.detach()) for name, tensor in trained.items()}
        self.regions = {name: region_of(name, tensor) for name, tensor in trained.items()}
        if not self._tensors:
            raise ValueError(
                "the model has no trainable parameter. Parameters take part if they are floating-point, have elements "
                f"and require a gradient: see requires_grad_(). parameters={len(named)}"
            )
        devices = {str(tensor.device): name for name, tensor in self._tensors.items()}
        if len(devices) != 1:
            raise ValueError(f"parameters must be on one device. {', '.join(map('='.join, sorted(devices.items())))}")
        self._device = next(iter(self._tensors.values())).device
        self._is_on_host = self._device.type == "cpu"
        # On which weights were last trained or changed; other devices have one for all threads.
        self._last_stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        # One for all workers: what one of them has queued comes before what the next one queues.
        new_stream: Any = torch.cuda.Stream
        self._worker_stream = new_stream(self._device) if self._device.type == "cuda" else None
        self.tensors = tuple(TensorSpec(name, tuple(tensor.shape)) for name, tensor in trained.items())
        self.dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in self._tensors.items()}
        self._watch = Watch(model, attached)
        self.release, self.look_again = self._watch.release, self._watch.look_again
        self._model = model
        # What shares memory with trained tensors changes with them. Nobody has said which tensors by name are frozen:
        # some may count batches.
        addresses = {place.ctypes.data for place in attached_places.values()}
        changing = {name for name, place in places.items() if place.ctypes.data in addresses}
        others = named.keys() - attached.keys() - changing if is_module else set()
        self._frozen = {name: tensor for name, tensor in named.items() if name in others}
        self._buffers = _own_names(model, persistent_buffers(model)) if isinstance(model, torch.nn.Module) else {}

    def check_in_memory(self) -> None:
        """Raises ValueError if the parameters have no values yet."""
        if self._device.type == "meta":
            raise ValueError(
                "parameters on the meta device have no values: load or make them first, for example by to_empty() and "
                f"an initialisation. parameter={next(iter(self._tensors))}"
            )

    def check_whole(self) -> None:
        """Raises ValueError if other processes hold parts of the model."""
        for spec in self.tensors:
            if self.regions[spec.name].shape != spec.shape:
                raise ValueError(f"process_group must have every rank that holds a part of the model. part={spec.name}")

    def reshard(self) -> None:
        """Has fully_shard forget gathered weights: the next pass would use them, and not what was adopted."""
        reshard(self._model)

    def frozen_parts(self) -> dict[str, FrozenPart]:
        """Returns what this process holds of the frozen parameters; reads all of it."""
        return frozen_parts(self._frozen)

    def untrained(self, parts: Mapping[str, Iterable[FrozenPart]] | None = None) -> tuple[UntrainedTensor, ...]:
        """Returns frozen parameters and persistent buffers; `parts` has what is held of the former, here by default."""
        if parts is None:
            parts = {name: [part] for name, part in self.frozen_parts().items()}
        return untrained_tensors(self._frozen, self._buffers, parts)

    def bits_sum(self, name: str) -> torch.Tensor:
        """Returns a checksum of what this process holds of a parameter."""
        return checksum(self._tensors[name])

    @property
    def encode(self) -> EncodeFrames:
        """The encoder for where the parameters are."""
        return encode_frames if self._is_on_host else encode_frames_torch

    def replaced(self) -> str | None:
        """Returns what, other than training, has replaced tensors or values, and what to do; cheap, for every step."""
        if self._last_stream is not None:
            self._last_stream = torch.cuda.current_stream(self._device)
        return self._watch.problem()

    def is_float32(self, layout: FragmentLayout) -> bool:
        """Whether every tensor of the fragment is float32."""
        return all(self._tensors[tensor.name].dtype == torch.float32 for tensor in layout.tensors)

    def buffer(self, layout: FragmentLayout) -> FlatArray:
        """Returns a vector for a snapshot."""
        if self._is_on_host:
            return vector(layout.numel)
        return torch.zeros(layout.numel, device=self._device, dtype=torch.float32)

    def snapshot(self, layout: FragmentLayout, out: FlatArray) -> Work:
        """Returns a function that copies the weights to `out`; on a GPU it does not wait for the copy."""
        tensors, pieces = self._pieces(layout, out)
        return self.ordered(lambda: torch._foreach_copy_(pieces, tensors), out)

    def add(self, layout: FragmentLayout, shift: FlatArray) -> Work:
        """Returns a function that adds to the weights, in float32 if they are narrower."""
        tensors, pieces = self._pieces(layout, shift)

        def work() -> None:
            copied = self._copy_pairs(layout)
            before = [tensor.clone() for tensor, _ in copied]
            torch._foreach_add_(tensors, pieces)
            for (tensor, copy), old in zip(copied, before, strict=True):  # by as much as a narrow tensor has changed
                copy.add_(tensor.to(copy) - old.to(copy))

        return self.ordered(self._watch.changing(layout.name, tensors, work), shift)

    def load(self, layout: FragmentLayout, values: FlatArray) -> Work:
        """Returns a function that overwrites the weights."""
        tensors, pieces = self._pieces(layout, values)

        def work() -> None:
            torch._foreach_copy_(tensors, pieces)
            for tensor, copy in self._copy_pairs(layout):
                copy.copy_(tensor)

        return self.ordered(self._watch.changing(layout.name, tensors, work), values)

    def from_host(self, values: NDArray[np.float32]) -> FlatArray:
        """Returns the values on the parameters' device, where they are when this returns."""
        if self._is_on_host:
            return values
        if self._device.type != "cuda":
            return torch.from_numpy(values).to(self._device)
        on_device = torch.empty(len(values), device=self._device)
        # From memory that is not pinned the driver copies by way of its own, and blocks this thread meanwhile.
        for first in range(0, len(values), _STAGED_NUMEL):
            piece = torch.from_numpy(values[first : first + _STAGED_NUMEL])
            staged = torch.empty(piece.numel(), pin_memory=True).copy_(piece)
            on_device[first : first + piece.numel()].copy_(staged, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return on_device

    def to_host(self, values: FlatArray) -> NDArray[np.float32]:
        """Returns the values on the host."""
        return values if self._is_on_host else values.cpu().numpy()  # type: ignore[no-any-return]

    def enter_worker(self) -> None:
        """Has this thread queue on the workers' stream, so that it and training don't wait for each other."""
        if self._worker_stream is not None:
            torch.cuda.set_stream(self._worker_stream)

    def synchronize(self) -> None:
        """Has this thread's stream wait for what was queued by now where weights were last trained or changed."""
        if self._last_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._last_stream)

    def ordered(self, work: Work, flat: FlatArray) -> Work:
        """Returns work on `flat` for the training thread, which comes after what this thread has queued so far.

        Only their streams wait for each other, not the threads.
        """
        if self._last_stream is None:
            return work
        prepared = torch.cuda.current_stream(self._device).record_event()

        def ordered() -> None:
            self.synchronize()
            self._last_stream = stream = torch.cuda.current_stream(self._device)
            stream.wait_event(prepared)
            work()
            flat.record_stream(stream)  # its memory is not used again before

        return ordered

    def _pieces(self, layout: FragmentLayout, flat: FlatArray) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Returns the tensors, and for each its piece of the flat vector in the tensor's shape.

        One call of torch then handles them all; between two calls another thread may hold the interpreter for 5 ms.
        """
        vector = torch.from_numpy(flat) if self._is_on_host else flat
        return [self._tensors[spec.name] for spec in layout.tensors], [
            vector[first : first + spec.numel].view(spec.shape)
            for spec, first in zip(layout.tensors, layout.offsets, strict=True)
        ]

    def _copy_pairs(self, layout: FragmentLayout) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the tensors of which the optimizer has a copy by now, with the copy.

        Raises:
            StopExchangingError: WEIGHTS_REPLACED: what the caller gave for a copy is none.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._copy_of is None:
            return pairs
        for spec in layout.tensors:
            tensor, copy = self._tensors[spec.name], self._copy_of(self._trained[spec.name])
            if copy is None:
                continue
            part = local_part(copy.detach())
            if part.shape != tensor.shape:
                raise StopExchangingError(
                    "WEIGHTS_REPLACED",
                    "`copies` must return the optimizer's copy of a parameter, of the same shape, or None. "
                    f"parameter={spec.name}, shape={tuple(tensor.shape)}, copy={tuple(part.shape)}",
                )
            pairs.append((tensor, part))
        return pairs


def _trainable(named: Mapping[str, torch.Tensor], *, are_all: bool) -> dict[str, torch.Tensor]:
    """Returns the tensors that are trained: those that require a gradient, or all.

    Raises:
        ValueError, TypeError: one is of a kind that can't be.
    """
    trainable: dict[str, torch.Tensor] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                "a Learner trains torch tensors; NumPy arrays are for ArrayLearner, those of JAX for JaxLearner of "
                f"skerry.integrations.jax. name={name}, type={type(tensor).__name__}"
            )
        if not (are_all or tensor.requires_grad):
            continue
        if reason := _unfit(tensor):
            raise ValueError(
                f"a parameter can't be exchanged: {reason}. Where it needs no training, freeze it: see "
                f"requires_grad_(). parameter={name}, dtype={tensor.dtype}, layout={tensor.layout}"
            )
        if tensor.is_floating_point() and tensor.numel():
            trainable[name] = tensor
    return trainable


def _places(tensors: Mapping[str, torch.Tensor]) -> dict[str, NDArray[Any]]:
    """Returns arrays that lie where tensors do of which this process holds elements as plain values.

    They are not read: what is there may be the memory of a device.
    """
    places = {}
    for name, tensor in tensors.items():
        if is_readable(tensor) and (part := local_part(tensor.detach())).numel() and part.data_ptr():
            interface = {
                "version": 3,
                "data": (part.data_ptr(), True),
                "shape": tuple(part.shape),
                "strides": tuple(stride * part.element_size() for stride in part.stride()),
                "typestr": f"|V{part.element_size()}",
            }
            places[name] = np.asarray(SimpleNamespace(__array_interface__=interface))
    return places


def _unfit(tensor: torch.Tensor) -> str | None:
    """Returns why a tensor can't be exchanged, and what would do; None if it can, or holds no numbers to train."""
    reason = None
    part = tensor if is_lazy(tensor) else local_part(tensor.detach())
    is_wrapper: bool = is_traceable_wrapper_subclass(part)
    if is_lazy(tensor):
        reason = "it has no shape before the model's first batch. Run one through the model, then attach"
    elif tensor.is_complex():
        reason = "complex parameters can't be merged. Train real ones, as torch.view_as_real gives"
    elif not tensor.is_floating_point():
        pass
    elif tensor.dtype not in _DTYPES:
        reason = "its type is too narrow for small steps. Train it in bfloat16 or float32, and convert it for each pass"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        reason = "sparse, nested and packed tensors have no fixed places for their elements. Train a dense tensor"
    elif is_wrapper:
        try:
            values = torch.empty(part.shape, dtype=torch.float32, device=part.device)
            torch._foreach_copy_([values], [part])
            torch._foreach_copy_([part], [values])
        except (RuntimeError, TypeError) as error:
            kind, cause = type(part).__name__, str(error).partition("\n")[0]
            reason = f"its tensor type can't be read and written ({kind}: {cause}). Train a plain tensor"
    elif any(size > 1 and not stride for size, stride in zip(part.shape, part.stride(), strict=True)):
        reason = "several of its elements are one place in memory. Train a copy of it, as clone() makes"
    return reason


def _own_names(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Returns each of the model's tensors, given by their paths, by its own name.

    Raises:
        ValueError: two have the same name.
    """
    wrapped = {
        f"{path}.{attribute}".removeprefix(".")
        for path, module in model.named_modules()
        if (attribute := wrapped_attribute(module)) is not None
    }
    named: dict[str, torch.Tensor] = {}
    for path, tensor in tensors:
        above = accumulate(path.split("."), lambda parent, attribute: f"{parent}.{attribute}")
        name = ".".join(part.rpartition(".")[2] for part in above if part not in wrapped)
        if name in named:
            raise ValueError(
                "two parameters have the same name once wrappers are left out. Rename one, or pass a mapping of names "
                f"to tensors instead of the module. name={name}, path={path}"
            )
        named[name] = tensor
    return named
