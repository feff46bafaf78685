"""What a synchronisation costs the syncer: processor time by stage, from real pushes to a store on disk.

    python -m benchmarks.syncer_path [--numel 50331648] [--fragments 4] [--learners 2] [--codec int4] [--rounds 6]

The syncer is a process of its own; deltas are encoded once and pushed over gRPC by clients in this process, all
fragments of a round at the same time, and each learner pulls every update. A learner's next push waits for the version.
The stages are functions that are wrapped in the syncer: `thread_time` of each, less that of the ones inside it.
What remains of the process's time is gRPC, the event loop and the handing over between threads.
Wall time is compared with writing and syncing as many bytes as the store took, by files of a part's size.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import hashlib
import itertools
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, measured, write_rows
from benchmarks.syncer_clients import PART_BYTES, Learner, create_run, encoded, layouts_of
from skerry.algorithm import step
from skerry.v1 import exchange_pb2 as exchange
from skerry.v1 import types_pb2 as types
from skerry.wire import frames
from skerry.wire.codecs import Codec, Compressor, Encoding
from skerry.wire.messages import encoding_to_message
from skerry_syncer.merge import merger
from skerry_syncer.run import parts
from skerry_syncer.server import ServerSettings, serving
from skerry_syncer.store.objects import local
from skerry_syncer.store.objects.opening import open_objects
from skerry_syncer.store.versions import replay

_spent: defaultdict[str, float] = defaultdict(float)
_calls: defaultdict[str, int] = defaultdict(int)
_inside = threading.local()


def staged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function with its thread's time counted under `name`, without that of staged functions inside."""

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        outer, _inside.spent = getattr(_inside, "spent", 0.0), 0.0
        began = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            took = time.thread_time() - began
            _spent[name] += took - _inside.spent
            _calls[name] += 1
            _inside.spent = outer + took

    return timed


_sha256 = hashlib.sha256


class _TimedHasher:
    def __init__(self, data: Any = b"") -> None:
        self._inner = _sha256()
        self.update = staged("digest", self._inner.update)
        self.digest, self.hexdigest = self._inner.digest, self._inner.hexdigest
        if len(data):
            self.update(data)


def stage_syncer() -> None:
    """Wraps the functions that do the syncer's work. Names that are not there any more are an error."""
    for stage, owner, attribute in (
        ("zstd decompress", frames, "decompress_exactly"),
        ("zstd compress, frame", step, "pack_frame"),
        ("checksum", frames, "crc32"),
        ("frame cutting", frames.FrameReader, "feed"),
        ("check: decode", parts.ArrivingPart, "feed"),
        ("check: norms", parts, "quantised_squared_norms"),
        ("accumulate", replay, "accumulate"),
        ("merge: norms", merger, "per_tensor_squared_norms"),
        ("advance", merger, "advance_span"),
        ("scratch checksum", step.OuterState, "actual_checksum"),
        ("store read", local._Opened, "read"),  # noqa: SLF001 - where the store's threads read
        *((f"store {name}", local.FileSystem, name) for name in ("write", "sync_file", "sync_folder", "publish")),
    ):
        setattr(owner, attribute, staged(stage, getattr(owner, attribute)))
    hashlib.sha256 = _TimedHasher  # type: ignore[assignment]


async def serve(directory: Path, *, is_staged: bool) -> None:
    """Serves until stdin ends; each line there is answered with the figures so far."""
    logging.getLogger("skerry").setLevel(logging.CRITICAL)
    if is_staged:
        stage_syncer()
    scratch = directory / "scratch"
    scratch.mkdir()
    loop = asyncio.get_running_loop()
    settings = ServerSettings(listen="127.0.0.1:0", scratch_directory=scratch)
    async with serving(open_objects((directory / "store").as_uri()), settings) as server:
        print(server.port, flush=True)
        while await loop.run_in_executor(None, sys.stdin.readline):
            figures = {
                "process": time.process_time(),
                "loop": time.thread_time(),
                "stages": dict(_spent),
                "calls": dict(_calls),
                "peak": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            }
            print(json.dumps(figures), flush=True)


async def drive(
    port: int, figures: Callable[[], Any], arguments: argparse.Namespace
) -> tuple[list[Any], list[float], int]:
    """Creates the run and synchronises; returns the figures around the rounds, their wall times and the bytes."""
    layouts = layouts_of(arguments.numel, arguments.fragments)
    codec = Codec(arguments.codec)
    encoding = Encoding(codec, compressor=Compressor(arguments.compressor))
    policy = types.Policy(
        inner_step_count=10,
        quorum_count=arguments.learners,
        grace_factor=0.9,
        delta_encoding=encoding_to_message(encoding),
        update_encoding=encoding_to_message(encoding),
        snapshot_ratio=arguments.snapshot_ratio,
    )
    policy.lease_term.FromMilliseconds(3000)
    numbers = np.random.default_rng(1)
    run = await create_run(port, layouts, policy, numbers)
    deltas = [
        {one.name: encoded(1e-3 * numbers.standard_normal(one.numel, np.float32), one, encoding) for one in layouts}
        for _ in range(arguments.learners)
    ]
    size = sum(len(data) for delta in deltas for parts in delta.values() for _, _, data, _ in parts)
    learners = [Learner(port, number, run, layouts) for number in range(1, arguments.learners + 1)]
    for learner in learners:
        await learner.attach()
        for name in learner.layouts:
            request = exchange.PullFragmentRequest(
                run="run", run_uid=run.uid, fragment=name, from_version=-1, is_newest=True
            )
            async for answer in learner.bulk.PullFragment(request):
                learner.digests[name] = answer.plan.target.digest or learner.digests[name]
    await asyncio.sleep(3.5)  # until the replica's view is complete
    found, walls = [], []

    async def synchronise(learner: Learner, name: str, parts: Any) -> None:
        await learner.push(name, parts)
        async with asyncio.timeout(120):
            await learner.committed[name].wait()
        await learner.pull(name)

    for _ in range(arguments.rounds + 1):
        found.append(figures())
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for learner, delta in zip(learners, deltas, strict=True):
                learner.step += 10
                for name, parts in delta.items():
                    tasks.create_task(synchronise(learner, name, parts))
        walls.append(time.perf_counter() - began)
        await asyncio.sleep(0.5)
    found.append(figures())
    for learner in learners:
        await learner.close()
    return found[1:], walls[1:], size


def disk_s(directory: Path, size: int) -> float:
    """Returns the seconds to write and sync `size` bytes in files of a part's size."""
    data = os.urandom(PART_BYTES)
    began = time.perf_counter()
    for nth in range(-(-size // PART_BYTES)):
        with (directory / f"limit-{nth}").open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
    took = time.perf_counter() - began
    for path in directory.glob("limit-*"):
        path.unlink()
    return took


def main() -> None:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=50_331_648, help="elements of the model")
    parser.add_argument("--fragments", type=int, default=4, help="fragments of the model")
    parser.add_argument("--learners", type=int, default=2, help="clients that push")
    parser.add_argument("--rounds", type=int, default=6, help="synchronisations that are measured")
    parser.add_argument("--codec", default="int4", help="of deltas and updates")
    parser.add_argument("--compressor", default="zstd", help="of deltas and updates")
    parser.add_argument("--snapshot-ratio", type=float, default=1e6, help="the policy's; by default no snapshots")
    parser.add_argument("--directory", help="where to put the store; by default a temporary folder")
    parser.add_argument("--plain", action="store_true", help="time no stages, which takes time itself")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        asyncio.run(serve(arguments.serve, is_staged=not arguments.plain))
        return
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-", dir=arguments.directory) as directory:
        folder = Path(directory)
        command = [sys.executable, "-m", "benchmarks.syncer_path", "--serve", directory]
        command += ["--plain"] if arguments.plain else []
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            asked, answers = server.stdin, server.stdout
            assert asked is not None
            assert answers is not None
            port = int(answers.readline())

            def figures() -> Any:
                asked.write("\n")
                asked.flush()
                return json.loads(answers.readline())

            found, walls, size = asyncio.run(drive(port, figures, arguments))
            asked.close()
        limit = statistics.median(disk_s(folder, size) for _ in range(3))
    report(found, walls, size, limit, arguments)


def report(found: list[Any], walls: list[float], size: int, limit: float, arguments: argparse.Namespace) -> None:
    """Prints and writes the rows."""
    case = f"{arguments.learners} learners, {arguments.numel / 1e6:.1f}M, {arguments.codec} {arguments.compressor}"
    contributed = arguments.learners * arguments.numel
    pairs = list(itertools.pairwise(found))

    def each(value: Callable[[Any], float]) -> list[float]:
        return [1e9 * (value(after) - value(before)) / contributed for before, after in pairs]

    rows: list[Row] = [
        measured(case, "synchronisation / write and sync", walls, "s", limit=limit),
        measured(case, "CPU a contributed parameter", each(lambda one: one["process"]), "ns"),
    ]
    for name in sorted(found[-1]["stages"], key=lambda name: -found[-1]["stages"][name]):
        count = (found[-1]["calls"][name] - found[0]["calls"].get(name, 0)) // len(pairs)
        spent = each(lambda one, name=name: one["stages"].get(name, 0.0))  # type: ignore[misc]
        rows.append(measured(case, f"{name} ({count} calls)", spent, "ns"))
    rows += [
        measured(case, "the rest", each(lambda one: one["process"] - sum(one["stages"].values())), "ns"),
        measured(case, "of all: event loop's thread", each(lambda one: one["loop"]), "ns"),
        measured(case, "peak memory / model's float32", [found[-1]["peak"] / arguments.numel / 4], "times"),
        measured(case, "bytes pushed", [size / 1e6], "MB"),
    ]
    write_rows(f"syncer_path-{arguments.codec}-{arguments.compressor}", rows)


if __name__ == "__main__":
    main()
