"""Processes of a torch process group, each of which runs one function of this module or of another's."""

from __future__ import annotations

import hashlib
import multiprocessing
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from skerry.errors import SkerryError

# Processes are forked from one that has imported torch and what its optimizers import, which takes seconds.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp", "skerry.learner"])
_TIMEOUT_S = 100.0


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what its function returned, or what it raised; neither if it was killed."""

    value: Any = None
    reason: str = ""
    message: str = ""
    exit_code: int | None = 0
    threads: tuple[str, ...] = ()  # of Skerry's, that the function left behind: at the interpreter's end they may abort


@dataclass(frozen=True)
class Rank:
    """What the function of a rank is given."""

    number: int
    count: int
    target: str


Program = Callable[..., Any]


def start(folder: Path, program: Program, count: int, target: str, *arguments: Any) -> Callable[[], list[Ended]]:
    """Starts `program(rank, *arguments)` on `count` ranks; returns a function that waits for their ends."""
    folder.mkdir(parents=True, exist_ok=True)
    started = []
    for number in range(count):
        ours, theirs = _CONTEXT.Pipe()
        rank = Rank(number, count, target)
        process = _CONTEXT.Process(target=_run, args=(theirs, str(folder / "store"), rank, program, arguments))
        process.start()
        theirs.close()
        started.append((process, ours))

    def wait() -> list[Ended]:
        ends = []
        for process, ours in started:
            try:
                ended = ours.recv() if ours.poll(_TIMEOUT_S) else Ended(message="still running")
            except EOFError:
                ended = Ended(message="killed")
            if ended.message == "still running":
                process.kill()
            process.join(_TIMEOUT_S)
            ends.append(replace(ended, exit_code=process.exitcode))
        return ends

    return wait


def run(folder: Path, program: Program, count: int, target: str, *arguments: Any) -> list[Ended]:
    """Returns how `program(rank, *arguments)` ended on each rank."""
    return start(folder, program, count, target, *arguments)()


def values(ends: Sequence[Ended]) -> list[Any]:
    """Returns what all ranks returned; none may have failed, or left threads behind."""
    assert [(end.message, end.threads) for end in ends] == [("", ())] * len(ends)
    return [end.value for end in ends]


def _run(connection: Connection, store: str, rank: Rank, program: Program, arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    file = distributed.FileStore(store, rank.count)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=file, rank=rank.number, world_size=rank.count)
    distributed.barrier()
    try:
        ended = Ended(program(rank, *arguments))
    except SkerryError as error:
        ended = Ended(reason=error.reason, message=str(error))
    except Exception as error:  # noqa: BLE001 - told to the test
        ended = Ended(reason=type(error).__name__, message=f"{error}\n{traceback.format_exc()}")
    left = [one for one in threading.enumerate() if one.name.startswith("skerry")]
    for one in left:  # it may still hear of the end
        one.join(2.0)
    threads = tuple(one.name for one in left if one.is_alive())
    connection.send(replace(ended, threads=threads))
    connection.close()
    if not ended.message:  # a rank that ends before would end what the others' threads wait for
        file.set(f"ended {rank.number}", "")
        with suppress(RuntimeError):
            file.wait([f"ended {number}" for number in range(rank.count)], timedelta(seconds=5))
    distributed.destroy_process_group()


def network(seed: int = 0, width: int = 12) -> nn.Module:
    """Returns a small network with an embedding, tied weights, and a bias that no two ranks can share evenly."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(24, width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 24), nn.Linear(24, 3)
    )
    model[3].weight = model[0].weight
    return model


def loss_of(model: nn.Module, step: int, part: int = 0, parts: int = 1) -> Any:
    """Returns the loss of one of `parts` equal parts of a step's batch."""
    tokens = torch.randint(0, 24, (24, 4), generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
    return nn.functional.cross_entropy(model(tokens).mean(1), tokens.sum(1) % 3)


def weights_digest(model: nn.Module) -> str:
    """Returns the digest of all parameters."""
    hasher = hashlib.sha256()
    for tensor in model.state_dict().values():
        hasher.update(tensor.numpy().tobytes())
    return hasher.hexdigest()
