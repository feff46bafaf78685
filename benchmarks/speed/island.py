"""A learner in a process of its own, as the synchronisation table drives it: `ArrayLearner` and made-up training.

Commands come as lines of JSON. "synchronise" changes every weight and takes the steps that make a delta of each
fragment due, then goes on to step until each has a new version.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

import numpy as np

from benchmarks.dialogue import Dialogue
from benchmarks.due_steps import DueSteps, H, steps_are_made_up
from benchmarks.speed.models import arrays_of
from skerry import ArrayLearner, Policy
from skerry.runtime.logs import log_to_stderr
from skerry.wire.codecs import Codec, Compressor, Encoding

_TIMEOUT_S: Final = 120.0
_STEP_SIZE: Final = 1e-3


def policy_of(codec: Codec, learner_count: int) -> Policy:
    """Returns a policy under which a round waits for all learners, with `codec` both ways."""
    compressor = Compressor.NONE if codec is Codec.FLOAT32 else Compressor.ZSTD
    encoding = Encoding(codec, compressor=compressor)
    return Policy(
        inner_step_count=H,
        quorum_count=learner_count,
        lease_term_s=60.0,
        delta_encoding=encoding,
        update_encoding=encoding,
    )


class Island:
    """One learner and the weights that it trains."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arrays = arrays_of(arguments.numel)
        self._noise = np.random.default_rng(arguments.number)
        steps_are_made_up()
        self._learner = ArrayLearner(
            self._arrays,
            target=arguments.target,
            run="speed",
            learner_id=f"island-{arguments.number}",
            create=True,
            policy=policy_of(Codec(arguments.codec), arguments.learners),
            connect_timeout_s=_TIMEOUT_S,
        )
        self._steps = DueSteps(self._learner)

    def prepare(self) -> None:
        """Changes every weight as training would, and takes all steps but the last few."""
        for array in self._arrays.values():
            np.add(array, _STEP_SIZE * self._noise.standard_normal(array.shape, np.float32), out=array)
        self._steps.approach()

    def synchronise(self) -> dict[str, Any]:
        """Returns what it took until every fragment has its next version."""
        cpu_s, start_s = time.process_time(), time.monotonic()
        self._steps.synchronise(_TIMEOUT_S)
        return {"start_s": start_s, "end_s": time.monotonic(), "cpu_s": time.process_time() - cpu_s}


def main() -> None:
    """Does as it is told."""
    log_to_stderr()
    dialogue = Dialogue()
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--learners", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--codec", required=True)
    island = Island(parser.parse_args())
    dialogue.answer()
    for command in dialogue.commands():
        match command["do"]:
            case "prepare":
                island.prepare()
                dialogue.answer()
            case "synchronise":
                dialogue.answer(**island.synchronise())


if __name__ == "__main__":
    main()
