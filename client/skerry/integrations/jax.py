"""JAX: a learner of a pytree of parameters, for Optax, Flax and loops of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from skerry.array_learner import EXIT_FLUSH_TIMEOUT_S, ArrayLearner, LearnerOptions
from skerry.model.interface import ArrayParameters, Work
from skerry.stats import LastWork
from skerry.wire import FragmentLayout, TensorSpec

__all__ = ["JaxLearner", "JaxParameters"]

PyTree: TypeAlias = Any


class JaxLearner(ArrayLearner):
    """Trains a pytree of JAX arrays together with the other learners of a run.

        with JaxLearner(params, target="syncer.example:443", run="gemma-12b", learner_id="us-east") as learner:
            params = learner.params  # the run's
            for batch in data:
                params, opt_state = update(params, opt_state, batch)
                params = learner.step(params, tokens=batch.size)
        params = learner.params

    Arrays stay where they are, on whatever devices of this process, with their sharding and their types. When a
    fragment is due, `step` waits for the training step before it and copies that fragment to the host. `update` may
    donate its arguments.

    Args:
        params: a pytree of floating-point arrays, of which no part is on devices of other processes. Tensors are named
            by their paths, as in `decoder.layers.0.kernel`.

    The other arguments are as `ArrayLearner` says.

    Raises:
        ValueError: a leaf is no array of floating-point numbers, or lies on devices of other processes.
        SkerryError: as `ArrayLearner`.
    """

    def __init__(self, params: PyTree, **options: Unpack[LearnerOptions]) -> None:
        self._held = JaxParameters(params)
        self._are_read = False  # the parameters, since a call that may have changed them
        super().__init__(self._held, **options)

    @property
    def params(self) -> PyTree:
        """The parameters to go on with: those of the last call, with what it loaded."""
        self._are_read = True
        return self._held.tree

    # Functional, as JAX is: parameters in, parameters out.
    def step(self, params: PyTree, tokens: int, loss: float | None = None) -> PyTree:  # type: ignore[override]
        """Reports one finished inner step that led to `params`, and returns those to go on with.

        A `loss` that is an array is waited for; leave it out where steps are to be dispatched ahead.

        Raises:
            ValueError: `tokens` is below 1, or `params` are not like those that were attached; or attaching or `flush`
                may have loaded newer ones, and `learner.params` was not read after it.
            SystemExit: `leave_soon` was called.
        """
        if not self._are_read:
            raise ValueError(
                "attaching and flush may load newer parameters, which these would undo. Go on with the newer ones: "
                "`params = learner.params` after each of these calls"
            )
        self._held.tree = params
        super().step(tokens, loss)
        return self._held.tree

    def leave(self, timeout_s: float = EXIT_FLUSH_TIMEOUT_S, *, load_merged: bool = False) -> LastWork:
        """As `ArrayLearner.leave`. If the parameters were donated after the last `step`, nothing can be sent."""
        if self._held.are_donated:
            self.close()
        return super().leave(timeout_s, load_merged=load_merged)

    def flush(self, timeout_s: float, *, is_last: bool = False) -> bool:
        """As `ArrayLearner.flush`; read `learner.params` after it."""
        self._are_read = False
        return super().flush(timeout_s, is_last=is_last)


class JaxParameters(ArrayParameters):
    """The leaves of a pytree by their paths. Arrays are replaced by new ones, since JAX changes none.

    Raises:
        ValueError: as `JaxLearner`.
    """

    def __init__(self, tree: PyTree) -> None:
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._arrays = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
        if len(self._arrays) < len(leaves):
            raise ValueError("two leaves have the same path once its parts are joined by dots")
        for name, leaf in self._arrays.items():
            if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ValueError(
                    f"only floating-point arrays of JAX can be trained; keep others apart. leaf={name}, "
                    f"type={getattr(leaf, 'dtype', type(leaf).__name__)}"
                )
            if leaf.dtype.itemsize < 2:
                raise ValueError(
                    "an array has too narrow a type for small steps: train it in bfloat16 or float32, and convert it "
                    f"for each pass. leaf={name}, type={leaf.dtype}"
                )
            if not leaf.is_fully_addressable:
                raise ValueError(
                    f"an array lies on devices of other processes too, which is not supported. leaf={name}"
                )
        self._trained = {name: (leaf.shape, leaf.dtype) for name, leaf in self._arrays.items() if leaf.size}
        if not self._trained:
            raise ValueError("there is no array to train")
        self.tensors = tuple(TensorSpec(name, shape) for name, (shape, _) in self._trained.items())
        self.dtypes = {name: str(dtype) for name, (_, dtype) in self._trained.items()}

    @property
    def tree(self) -> PyTree:
        """The parameters; those that are put here must have the same structure, shapes and types.

        Raises:
            ValueError: they have others.
        """
        return jax.tree_util.tree_unflatten(self._structure, list(self._arrays.values()))

    @tree.setter
    def tree(self, tree: PyTree) -> None:
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != self._structure:
            raise ValueError(f"the parameters have another structure than those attached: {structure}")
        arrays = dict(zip(self._arrays, leaves, strict=True))
        for name, kind in self._trained.items():
            leaf = arrays[name]
            if not isinstance(leaf, jax.Array) or (leaf.shape, leaf.dtype) != kind:
                raise ValueError(
                    f"a parameter has another shape or type than when it was attached. leaf={name}, {kind=}"
                )
        self._arrays = arrays

    @property
    def are_donated(self) -> bool:
        """Whether an update took the memory of parameters, and their successors were not put here."""
        return any(leaf.is_deleted() for leaf in self._arrays.values())

    def replaced(self) -> str | None:
        """Returns nothing: arrays are always replaced."""
        return None

    def add(self, layout: FragmentLayout, shift: NDArray[np.float32]) -> Work:
        """Returns a function that adds to the weights, in float32 if they are narrower."""
        return self._change(layout, shift, lambda leaf, piece: leaf + piece)

    def load(self, layout: FragmentLayout, values: NDArray[np.float32]) -> Work:
        """Returns a function that replaces the weights."""
        return self._change(layout, values, lambda _, piece: piece)

    def _change(
        self, layout: FragmentLayout, flat: NDArray[np.float32], change: Callable[[jax.Array, jax.Array], jax.Array]
    ) -> Work:
        """Returns a function that puts `change(leaf, piece)` in place of each leaf, with its type and its sharding."""
        # Copies, since on the CPU an array of JAX may be a view of one of NumPy.
        pieces = [
            (name, jax.device_put(piece.copy(), self._arrays[name].sharding)) for name, piece in layout.pieces(flat)
        ]

        def work() -> None:
            for name, piece in pieces:
                leaf = self._arrays[name]
                changed = change(leaf, piece).astype(leaf.dtype)
                self._arrays[name] = jax.device_put(changed, leaf.sharding)

        return work
