"""One island with JAX and Optax: `python examples/jax_optax.py LEARNER_ID STEPS OUT`."""

import os
import sys
from pathlib import Path

import jax
import optax
from safetensors.numpy import save_file

from skerry.integrations.jax import JaxLearner

learner_id, steps, out = sys.argv[1:]
key, *layer_keys = jax.random.split(jax.random.key(sum(learner_id.encode())), 3)
params = {f"layer{n}": jax.random.normal(layer_keys[n], (128, 128)) / 16 for n in range(2)}
optimizer = optax.adamw(0.01)
opt_state = optimizer.init(params)


def loss_of(params: dict[str, jax.Array], inputs: jax.Array) -> jax.Array:  # noqa: D103
    return ((jax.nn.gelu(inputs @ params["layer0"]) @ params["layer1"] - inputs[:, ::-1]) ** 2).mean()


@jax.jit
def update(params: dict[str, jax.Array], opt_state: optax.OptState, key: jax.Array) -> tuple[dict, optax.OptState]:  # noqa: D103
    gradients = jax.grad(loss_of)(params, jax.random.normal(key, (1024, 128)))
    changes, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, changes), opt_state


planned = 2 * 1024 * int(steps)  # of two learners
options = {"run": "jax", "learner_id": learner_id, "create": True, "planned_token_count": planned}
with JaxLearner(params, target=os.environ.get("SKERRY_TARGET", "127.0.0.1:50051"), **options) as learner:
    params = learner.params
    for step in range(int(steps)):
        params, opt_state = update(params, opt_state, jax.random.fold_in(key, step))
        params = learner.step(params, tokens=1024)
    learner.leave(60.0, load_merged=True)
Path(out).mkdir()
save_file({name: jax.device_get(value) for name, value in learner.params.items()}, f"{out}/model.safetensors")
