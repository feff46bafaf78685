"""JAX and Optax as a learner: an example, and a pytree that is narrow, sharded and donated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.torch import load_file

from skerry import ArrayLearner, Policy
from skerry.integrations.jax import JaxLearner, JaxParameters
from skerry.model.fragment_plan import plan_fragments
from skerry.model.interface import ArrayParameters
from tests.e2e.trainers.two_islands import assert_merged, train_two_islands

jax.config.update("jax_num_cpu_devices", 2)
QUICK = Policy(inner_step_count=4, quarantine_ratio=0.0)


def test_two_islands_one_is_killed_and_the_merged_parameters_load(target: str, tmp_path: Path) -> None:
    out = train_two_islands("jax_optax", target, "jax", tmp_path, step_count=2000)  # of a millisecond or two
    assert_merged(target, "jax", load_file(out / "model.safetensors"))


def tree(dtype: Any) -> dict[str, Any]:
    """Returns a pytree of two levels, sharded over two devices where it can be."""
    sharding = jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec("x"))
    kernel = jax.device_put(jnp.linspace(-1, 1, 64).reshape(8, 8).astype(dtype), sharding)
    bias = jax.device_put(jnp.ones(4, dtype), sharding)
    return {"layers": [{"kernel": kernel}, {"kernel": kernel * 2, "bias": bias}], "none": jnp.ones((0, 2))}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_they_change_as_arrays_of_numpy_do_and_stay_where_they_are(dtype: Any) -> None:
    held = JaxParameters(tree(dtype))
    arrays = {name: np.array(leaf) for name, leaf in held._arrays.items()}
    layout = plan_fragments(held.tensors, fragment_count=1).fragments[0]
    values = np.random.default_rng(0).normal(size=layout.numel).astype(np.float32)
    place = held.tree["layers"][1]["kernel"].sharding
    for change in ("add", "load", "add"):
        getattr(held, change)(layout, values)()
        taken = held.buffer(layout)
        held.snapshot(layout, taken)()
        for tensor, first in zip(layout.tensors, layout.offsets, strict=True):
            array, piece = arrays[tensor.name], values[first : first + tensor.numel].reshape(tensor.shape)
            wide = array.astype(np.float32)
            arrays[tensor.name] = (wide + piece if change == "add" else piece).astype(array.dtype)
            shown = taken[first : first + tensor.numel].reshape(tensor.shape)
            assert np.array_equal(arrays[tensor.name].astype(np.float32), shown), (change, tensor.name)
    kernel = held.tree["layers"][1]["kernel"]
    assert (kernel.dtype, kernel.sharding, held.tree["none"].shape) == (dtype, place, (0, 2))
    if dtype != jnp.bfloat16:
        assert held.dtypes == ArrayParameters(arrays).dtypes


def test_what_is_loaded_is_no_view_of_memory_of_the_exchange() -> None:
    held = JaxParameters({"kernel": jnp.zeros((64, 64))})
    layout = plan_fragments(held.tensors, fragment_count=1).fragments[0]
    values = np.ones(layout.numel, np.float32)
    held.load(layout, values)()
    values[:] = 2
    assert float(held.tree["kernel"].max()) == 1


def test_a_sharded_pytree_whose_memory_is_donated_learns_and_ends_with_the_runs_weights(target: str) -> None:
    def loss_of(params: Any) -> Any:
        return sum((leaf.astype(jnp.float32) ** 2).sum() for leaf in jax.tree.leaves(params["layers"]))

    def descend(leaf: Any, gradient: Any) -> Any:
        return leaf - leaf.dtype.type(0.05) * gradient

    update = jax.jit(lambda params: jax.tree.map(descend, params, jax.grad(loss_of)(params)), donate_argnums=0)
    options: dict[str, Any] = {"target": target, "run": "fit", "create": True, "policy": QUICK}
    with JaxLearner(tree(jnp.bfloat16), learner_id="us", **options) as learner:
        params = learner.params
        before = float(loss_of(params))
        for _ in range(300):
            params = update(params)
            params = learner.step(params, tokens=8, loss=loss_of(params))
        assert learner.leave(30.0, load_merged=True)
        merged = learner.stats.deltas_merged
        params = learner.params
    assert merged > 5
    assert float(loss_of(params)) < before / 2
    arrays = {name: np.zeros(spec.shape, np.float32) for name, spec in learner._held._arrays.items() if spec.size}
    ArrayLearner(arrays, target=target, run="fit", learner_id="reader").close()
    for name, array in arrays.items():
        assert np.array_equal(array.astype(jnp.bfloat16), learner._held._arrays[name]), name


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": jnp.ones(2), "step": jnp.zeros((), jnp.int32)}, "leaf=step, type=int32"),
        ({"a": jnp.ones(2), "odd": jnp.zeros(2, jnp.float8_e4m3fn)}, "leaf=odd, type=float8_e4m3fn"),
        ({"a": np.ones(2, np.float32)}, "only floating-point arrays of JAX"),
        ({"a.b": jnp.ones(2), "a": {"b": jnp.ones(2)}}, "the same path"),
        ({"a": jnp.ones((0, 2))}, "no array to train"),
    ],
)
def test_what_can_not_be_trained_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JaxParameters(given)


def test_parameters_that_are_not_those_attached_are_refused() -> None:
    held = JaxParameters({"a": jnp.ones(2)})
    for other in ({"b": jnp.ones(2)}, {"a": jnp.ones(3)}, {"a": jnp.ones(2, jnp.bfloat16)}, {"a": np.ones(2)}):
        with pytest.raises(ValueError, match=r"another (structure|shape or type)"):
            held.tree = other
    assert held.tree["a"].shape == (2,)


@pytest.mark.parametrize("is_flushed", [False, True])
def test_parameters_of_before_a_call_that_may_change_them_are_refused(target: str, *, is_flushed: bool) -> None:
    given = {"w": jnp.ones(2)}
    with JaxLearner(given, target=target, run="fit", learner_id="us", create=True, policy=QUICK) as learner:
        if is_flushed:
            given = learner.step(learner.params, tokens=1)
            learner.flush(10.0)
        with pytest.raises(ValueError, match=r"params = learner\.params"):
            learner.step(given, tokens=1)
        assert learner.stats.step_count == is_flushed
        learner.step(learner.params, tokens=1)
        assert learner.stats.step_count == is_flushed + 1


def test_ctrl_c_while_the_parameters_are_donated_ends_as_such(target: str, caplog: pytest.LogCaptureFixture) -> None:
    update = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf * 0.9, params), donate_argnums=0)

    def train() -> None:
        given = {"w": jnp.ones((64, 64))}
        with JaxLearner(given, target=target, run="fit", learner_id="us", create=True) as learner:
            params = learner.params
            for _ in range(3):
                params = learner.step(update(params), tokens=1)
            update(params)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert "unsent_steps=3" in caplog.text
