"""What the exchange costs the training thread: the time inside `step()`, throughput with it on and off, memory.

One learner of a torch model in 24 fragments, one of which moves at each step, beside a real `skerry serve`. The limit
of a step is 1 s: at first it sleeps, so that pauses are the exchange's own, then it computes on one thread.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import children, served
from benchmarks.report import Row, measured
from benchmarks.speed.measuring import Size, paired
from benchmarks.speed.models import layout_of

_FRAGMENTS: Final = 24
_BLOCK_STEPS: Final = 6


def rows(size: Size) -> Iterator[Row]:
    """A model of 100 million parameters."""
    numel, step_s = size.pick(100_000_000, 10_000_000), 0.2 if size.is_quick else 1.0
    rest_steps = size.pick(2 * _FRAGMENTS, _FRAGMENTS + 6)
    with tempfile.TemporaryDirectory(prefix="skerry-benchmark-") as name, served(Path(name)) as syncer:
        arguments = f"--target={syncer.target} --numel={numel} --fragments={_FRAGMENTS} --step-s={step_s}".split()
        with children("benchmarks.speed.trainee", [arguments], Path(name)) as (trainee,):
            joined_bytes = trainee.hear()["joined_bytes"]
            # The first deltas are due after H steps; from then on one fragment a step.
            trainee.tell(do="rest", count=_FRAGMENTS)
            trainee.hear()
            used = syncer.store_use()
            trainee.tell(do="rest", count=rest_steps)
            rested = trainee.hear()
            used = {kind: value - used[kind] for kind, value in syncer.store_use().items()}
            blocks: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
            for sample in range(size.samples + 1):
                for is_on in (True, False):
                    trainee.tell(do="work", count=_BLOCK_STEPS, is_on=is_on)
                    worked = trainee.hear()
                    if sample:
                        blocks[is_on].append(worked)
                    syncer.wait_idle()  # or what was sent in one block would burden the next
    size_bytes = 4 * layout_of(numel).numel
    case = f"{size_bytes / 4e6:.3g}M parameters, {_FRAGMENTS} fragments, steps of {step_s:.1f} s"
    stalls_s = rested["stalls_s"]
    yield measured(case, "time in step(), median / step", [1e3 * one for one in stalls_s], "ms", limit=1e3 * step_s)
    yield measured(case, "time in step(), longest / step", [1e3 * max(stalls_s)], "ms", limit=1e3 * step_s)
    speeds = {is_on: [_BLOCK_STEPS / one["wall_s"] for one in own] for is_on, own in blocks.items()}
    yield paired(case, "training speed, exchange on / off", speeds[True], "steps/s", limits=speeds[False])
    yield measured(case, "peak memory beyond training / float32 size", [rested["peak_bytes"] / size_bytes], "")
    yield measured(case, "the same while it joins / float32 size", [joined_bytes / size_bytes], "")
    yield measured(case, "versions adopted while it slept", [float(rested["versions"])], "")
    versions = used.pop("versions")
    for kind, value in used.items():
        yield measured(case, f"{kind}, a version of a fragment", [value / versions], "")
