"""The interface between the exchange and a model's weights, with its implementation for NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.rebase import FlatArray
from skerry.runtime.vectors import vector
from skerry.wire import FragmentLayout, TensorSpec
from skerry.wire.frames import encode_frames
from skerry.wire.untrained import UntrainedTensor

# Prepared by a worker, called by the training thread.
Work = Callable[[], None]
# `skerry.wire.frames.encode_frames`, or its equal for arrays on a device.
EncodeFrames: TypeAlias = Callable[..., Iterator[bytes]]
UNLIMITED: Final = 2**30
"""A `moving_limit` for models whose vectors fit the memory."""


def tied(places: Mapping[str, NDArray[Any]]) -> set[str]:
    """Returns the names of arrays that are an earlier array under a second name.

    Raises:
        ValueError: two share a part of their memory, or lie in it in different orders.
    """
    names: set[str] = set()
    spans = {name: _span(array) for name, array in places.items()}
    open_names: list[str] = []  # of those that end behind where the current one begins
    for name in sorted(places, key=spans.__getitem__):
        open_names = [other for other in open_names if spans[other][1] > spans[name][0]]
        for other in (other for other in open_names if np.shares_memory(places[other], places[name])):
            first, second = ((array.ctypes.data, array.shape, array.strides) for array in (places[other], places[name]))
            if first != second:
                raise ValueError(
                    "two tensors share memory, but are not the same tensor under two names, so that a change of one is "
                    f"one of the other. Train a copy of one of them. first={other}, second={name}"
                )
            names.add(name)
        open_names.append(name)
    return names


def _span(array: NDArray[Any]) -> tuple[int, int]:
    """Returns the address of an array's first byte, and of the one behind the last."""
    reach = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    first = array.ctypes.data + sum(step for step in reach if step < 0)
    return first, first + sum(map(abs, reach)) + array.itemsize


class Parameters(Protocol):
    """Named tensors, read and written a fragment at a time as flat float32 vectors on the same device.

    `snapshot`, `add` and `load` run in a worker and return a function for the training thread. All views are made
    beforehand, so that the function only copies or adds.
    """

    @property
    def moving_limit(self) -> int:
        """How many fragments may be copied, pulled and adopted at the same time, each with whole vectors in memory."""

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Every tensor that is trained, tied ones once."""

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Their element types, by name, as exports name them."""

    @property
    def encode(self) -> EncodeFrames:
        """The encoder for flat arrays of this kind."""

    def untrained(self) -> tuple[UntrainedTensor, ...]:
        """Returns what else the model has, as far as that is known: may read all of it, in a worker."""

    def replaced(self) -> str | None:
        """Returns what, other than training, has replaced tensors or values, and what to do; cheap, for every step."""

    def is_float32(self, layout: FragmentLayout) -> bool:
        """Whether the fragment's tensors hold float32 exactly."""

    def buffer(self, layout: FragmentLayout) -> FlatArray:
        """Returns a vector for a snapshot, with its memory already allocated."""

    def snapshot(self, layout: FragmentLayout, out: FlatArray) -> Work:
        """Returns a function that copies the weights to `out`."""

    def add(self, layout: FragmentLayout, shift: FlatArray) -> Work:
        """Returns a function that adds to the weights, in place."""

    def load(self, layout: FragmentLayout, values: FlatArray) -> Work:
        """Returns a function that overwrites the weights."""

    def from_host(self, values: NDArray[np.float32]) -> FlatArray:
        """Returns the values on the parameters' device; may be `values` itself."""

    def to_host(self, values: FlatArray) -> NDArray[np.float32]:
        """Returns the values on the host."""

    def enter_worker(self) -> None:
        """Prepares the thread of a worker; called in it before its first work."""

    def synchronize(self) -> None:
        """Has this thread go on with what others have queued on the parameters' device by now."""


class ArrayParameters:
    """NumPy arrays by name, updated in place. One array under two names is one tensor, under the first.

    Raises:
        ValueError: an array can't be written to, does not hold floating-point numbers, or overlaps with another one.
    """

    encode: EncodeFrames = staticmethod(encode_frames)
    moving_limit = UNLIMITED

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, array in arrays.items():
            if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or not array.flags.writeable:
                raise ValueError(
                    "only writable floating-point NumPy arrays can be trained, in place; those of JAX by JaxLearner of "
                    f"skerry.integrations.jax, others as copies made by np.array(). array={name}, "
                    f"type={type(array).__name__}"
                )
        self._given = arrays
        self._watched = {name: array for name, array in arrays.items() if array.size}
        if not self._watched:
            raise ValueError("there is no array to train")
        names = tied(self._watched)
        self._arrays: dict[str, Any] = {name: array for name, array in self._watched.items() if name not in names}
        self.tensors = tuple(TensorSpec(name, array.shape) for name, array in self._arrays.items())
        self.dtypes = {name: str(array.dtype) for name, array in self._arrays.items()}

    def untrained(self) -> tuple[UntrainedTensor, ...]:
        """Returns nothing: the model may have more tensors, but they are not known here."""
        return ()

    def replaced(self) -> str | None:
        """Returns which array the caller has put another one in place of, and what to do."""
        return next(
            (
                "an array was replaced after attaching, and the new one takes no part: change arrays in place, for "
                f"example by array[...] = values. array={name}"
                for name, array in self._watched.items()
                if self._given.get(name) is not array
            ),
            None,
        )

    def is_float32(self, layout: FragmentLayout) -> bool:
        """Whether every array of the fragment is float32."""
        return all(self._arrays[tensor.name].dtype == np.float32 for tensor in layout.tensors)

    def buffer(self, layout: FragmentLayout) -> NDArray[np.float32]:
        """Returns a vector for a snapshot."""
        return vector(layout.numel)

    def snapshot(self, layout: FragmentLayout, out: NDArray[np.float32]) -> Work:
        """Returns a function that copies the weights to `out`."""
        return self._work(layout, out, lambda array, piece: np.copyto(piece, array, casting="same_kind"))

    def add(self, layout: FragmentLayout, shift: NDArray[np.float32]) -> Work:
        """Returns a function that adds to the weights, in float32 if they are narrower."""
        return self._work(layout, shift, lambda array, piece: np.add(array, piece, out=array, casting="same_kind"))

    def load(self, layout: FragmentLayout, values: NDArray[np.float32]) -> Work:
        """Returns a function that overwrites the weights."""
        return self._work(layout, values, lambda array, piece: np.copyto(array, piece, casting="same_kind"))

    def from_host(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns `values`."""
        return values

    def to_host(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns `values`."""
        return values

    def enter_worker(self) -> None:
        """Does nothing."""

    def synchronize(self) -> None:
        """Does nothing, since NumPy queues nothing."""

    def _work(
        self,
        layout: FragmentLayout,
        flat: NDArray[np.float32],
        change: Callable[[NDArray[Any], NDArray[np.float32]], object],
    ) -> Work:
        """Returns a function that calls `change` with each array and its piece of `flat`, in the array's shape."""
        pieces = layout.pieces(flat)

        def work() -> None:
            for name, piece in pieces:
                change(self._arrays[name], piece)

        return work
