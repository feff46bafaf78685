"""Any framework without a learner of its own: Skerry holds NumPy copies of the parameters, changed in place.

`python examples/arrays.py us`. Copy them back after `flush`, `state_dict` and `load_state_dict` too, if you call these.
"""

import os
import sys

import numpy as np

from skerry import ArrayLearner

TARGET = os.environ.get("SKERRY_TARGET", "127.0.0.1:50051")
STEPS = 300

learner_id = sys.argv[1]
draw = np.random.default_rng(sum(learner_id.encode()))
wanted = np.linspace(-1, 1, 64).reshape(16, 4)


def train_step(params: dict[str, np.ndarray], inputs: np.ndarray) -> tuple[dict[str, np.ndarray], float]:
    """Returns new parameters and the loss."""
    error = inputs @ params["kernel"] + params["bias"] - inputs @ wanted
    gradients = {"kernel": inputs.T @ error / len(inputs), "bias": error.mean(0)}
    return {name: value - 0.1 * gradients[name] for name, value in params.items()}, float((error**2).mean())


params = {"kernel": np.zeros((16, 4)), "bias": np.zeros(4)}
copies = {name: np.array(value, np.float32) for name, value in params.items()}
planned = 2 * STEPS * 32  # of two learners
with ArrayLearner(
    copies, target=TARGET, run="arrays", learner_id=learner_id, create=True, planned_token_count=planned
) as learner:
    params = {name: value.astype(np.float64) for name, value in copies.items()}  # attaching has loaded the run's
    for _ in range(STEPS):
        params, loss = train_step(params, draw.normal(size=(32, 16)))
        for name, value in params.items():
            copies[name][...] = value
        if learner.step(tokens=32, loss=loss):  # it has loaded a newer version of something
            params = {name: value.astype(np.float64) for name, value in copies.items()}
