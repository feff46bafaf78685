"""How a system's module is driven: `--serve` starts what its learners need, `--number` a learner. Lines of JSON."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from benchmarks.dialogue import Dialogue
from benchmarks.rivals.peers import model


class Peer(Protocol):
    """One learner of a system."""

    def weights(self) -> list[Any]:
        """Returns its weights as arrays that share their memory."""

    def prepare(self) -> None:
        """Does what comes before a synchronisation and is not measured; the weights have changed."""

    def synchronise(self) -> None:
        """Returns when this learner has the weights that its change and all others' made."""


def converse(serve: Callable[[argparse.Namespace], str], learn: Callable[[argparse.Namespace], Peer]) -> None:
    """Does as it is told on standard input, until that ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--target", default="")
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    dialogue = Dialogue()
    if arguments.serve:
        dialogue.answer(target=serve(arguments))
        sys.stdin.read()
        os._exit(0)
    peer, training = learn(arguments), model.Training(arguments.number)
    dialogue.answer()
    for command in dialogue.commands():
        if command["do"] == "prepare":
            training.change(peer.weights())
            before = model.sample(peer.weights())
            peer.prepare()
            dialogue.answer(sample=before)
        else:
            begin_s = time.monotonic()
            peer.synchronise()
            dialogue.answer(begin_s=begin_s, end_s=time.monotonic(), sample=model.sample(peer.weights()))
    os._exit(0)  # a system that can't leave a group does not keep the benchmark waiting
