"""One campaign: a storm from a seed, a calm run of as many merged tokens, and the verdict on both."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.chaos.deployment import Deployment
from tests.chaos.director import Director
from tests.chaos.schedule import UNTOUCHED, draw
from tests.chaos.store_place import StorePlace, store_place
from tests.chaos.watcher import CALM_S, Learned
from tests.simulation.auditor import Finding

_LOOK_EVERY_S: Final = 5.0
_END_S: Final = 60.0
# The share of the time that the storm has; the calm run needs less, since nothing stops it.
_STORM_SHARE: Final = 0.4
_LOSS_SHARE: Final = 0.01
# A step in the storm against one in the calm run, by median; and how long one may be held up in the product, where a
# processor was free for it: a learner copies a fragment there, and other threads of its process have the interpreter.
_STEP_SHARE: Final = 0.05
_STALL_S: Final = 0.1
_FIRST_STEPS: Final = 20


@dataclass
class Result:
    """What a campaign found, and what its report says."""

    findings: list[Finding] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)


async def run_campaign(
    kind: str, seed: int, minutes: float, folder: Path, *, is_own_machine: bool, say: Callable[[str], None]
) -> Result:
    """Runs the storm and the calm run after it; `is_own_machine`: in network and mounts of our own."""
    result = Result()
    with store_place(kind, folder, may_mount=is_own_machine) as place:
        storm_s = 60 * minutes * _STORM_SHARE
        say(f"storm of {storm_s:.0f} s on {kind}, seed {seed}")
        learned, tokens, times = await _storm(place, seed, storm_s, folder, result, is_own_machine, say)
        say(f"calm run until {min(tokens.values(), default=0)} tokens are merged")
        calm, calm_times = await _calm(place, seed, tokens, 60 * minutes, folder, result, say)
    _compare_losses(result, learned, calm)
    _compare_times(result, times, calm_times)
    result.report["findings"] = [str(finding) for finding in result.findings]
    return result


async def _storm(
    place: StorePlace,
    seed: int,
    storm_s: float,
    folder: Path,
    result: Result,
    is_own_machine: bool,
    say: Callable[[str], None],
) -> tuple[Learned, dict[str, int], dict[str, float]]:
    plan = draw(seed, storm_s)
    async with Deployment(place, "storm", folder / "storm", seed=seed, schedule=plan, say=say) as on:
        director = Director(on, may_drop=is_own_machine)
        await _until_trained(on, say)
        looking = asyncio.create_task(_look_on(on, director, say))
        await director.storm(plan, storm_s)
        say("calm: everything is healed")
        on.watcher.begin_calm()
        deadline_s = time.monotonic() + CALM_S
        while not (has_calmed := await on.watcher.has_calmed()) and time.monotonic() < deadline_s:
            on.supervise()
            await asyncio.sleep(1.0)
        calm_s = CALM_S - (deadline_s - time.monotonic())
        say(f"{calm_s:.0f} s after the storm all has calmed{'' if has_calmed else f', but {on.watcher.still_open}'}")
        looking.cancel()
        await on.end(_END_S)
        say("audit")
        result.findings += await on.watcher.audit_all()
        visited, every = director.points()
        result.report["faults"] = dict(sorted(on.faults.items()))
        result.report["fault_points"] = {
            "visited": len(visited),
            "of": len(every),
            "left": [
                f"{p.replica} {p.operation.verb} {p.operation.kind} {p.moment} {p.deed}"
                for p in sorted(every - visited)
            ][:400],
        }
        result.report["processes"] = {
            child.name: child.start_count for child in (*(one.child for one in on.replicas), *on.learners)
        }
        result.report["storm"] = on.watcher.counts()
        return await on.watcher.learned(), on.watcher.merged_tokens(), _times(on)


async def _calm(
    place: StorePlace,
    seed: int,
    tokens: dict[str, int],
    within_s: float,
    folder: Path,
    result: Result,
    say: Callable[[str], None],
) -> tuple[Learned, dict[str, float]]:
    async with Deployment(place, "calm", folder / "calm", seed=seed, say=say) as on:
        deadline_s = time.monotonic() + within_s
        said_s = time.monotonic()
        while time.monotonic() < deadline_s:
            await on.watcher.look()
            on.supervise()
            merged = on.watcher.merged_tokens()
            if merged and all(merged.get(name, 0) >= count for name, count in tokens.items()):
                break
            if time.monotonic() - said_s > 10:
                said_s = time.monotonic()
                say(f"calm run: {min(merged.values(), default=0)} tokens merged")
            await asyncio.sleep(1.0)
        await on.end(_END_S)
        result.findings += [Finding(f"calm run: {one.rule}", one.detail) for one in await on.watcher.audit_all()]
        result.report["calm"] = on.watcher.counts()
        return await on.watcher.learned(tokens), _times(on)


async def _until_trained(on: Deployment, say: Callable[[str], None]) -> None:
    """Returns when everybody has joined and something was merged."""
    deadline_s = time.monotonic() + 120.0
    while time.monotonic() < deadline_s:
        await on.watcher.look()
        on.supervise()
        if on.watcher.merged_tokens() and all(one.record.session for one in on.watcher.accounts):
            say("everybody has joined")
            return
        await asyncio.sleep(0.5)
    say("not everybody has joined")


async def _look_on(on: Deployment, director: Director, say: Callable[[str], None]) -> None:
    while True:
        await on.watcher.look()
        visited, every = director.points()
        counts = on.watcher.counts()
        say(
            f"versions={counts['versions']} deltas={counts['deltas_acknowledged']} steps={counts['steps_audited']} "
            f"points={len(visited)}/{len(every)} findings={len(on.watcher.findings)}"
        )
        await asyncio.sleep(_LOOK_EVERY_S)


def _times(on: Deployment) -> dict[str, float]:
    """Returns the untouched learner's times, in milliseconds."""
    (account,) = [one for one in on.watcher.accounts if one.record.learner == f"learner-{UNTOUCHED}"]
    _, cycle_s, stall_s = account.times()
    cycle_s, stall_s = cycle_s[_FIRST_STEPS:], stall_s[_FIRST_STEPS:]
    if not len(cycle_s):
        return {}
    return {
        "steps": len(cycle_s),
        "step_ms_median": _ms(np.median(cycle_s)),
        "step_ms_p99": _ms(np.quantile(cycle_s, 0.99)),
        "in_product_ms_median": _ms(np.median(stall_s)),
        "in_product_ms_p99": _ms(np.quantile(stall_s, 0.99)),
        "in_product_ms_max": _ms(stall_s.max()),
    }


def _ms(seconds: float) -> float:
    return round(1000 * float(seconds), 2)


def _compare_losses(result: Result, storm: Learned, calm: Learned) -> None:
    share = storm.loss / calm.loss - 1
    result.report["loss"] = {
        "storm": round(storm.loss, 5),
        "calm": round(calm.loss, 5),
        "difference_percent": round(100 * share, 3),
        "tokens": storm.tokens,
        "tokens_calm": calm.tokens,
    }
    short = [name for name, count in storm.tokens.items() if calm.tokens.get(name, 0) < count]
    if short:
        result.findings.append(Finding("the calm run merges as many tokens", f"it did not of {short} within its time"))
    elif share > _LOSS_SHARE:
        detail = f"{100 * share:.2f} % above a calm run of as many merged tokens: {storm.loss:.4f}, {calm.loss:.4f}"
        result.findings.append(Finding("the storm costs no loss", detail))


def _compare_times(result: Result, storm: dict[str, float], calm: dict[str, float]) -> None:
    result.report["untouched_learner"] = {"storm": storm, "calm": calm}
    if not storm or not calm:
        result.findings.append(Finding("the untouched learner trains", f"storm={storm}, calm={calm}"))
        return
    rule = "the untouched learner's steps take what they take in a calm run"
    if storm["step_ms_median"] > (1 + _STEP_SHARE) * calm["step_ms_median"]:
        detail = f"median {storm['step_ms_median']} ms, calm {calm['step_ms_median']} ms"
        result.findings.append(Finding(rule, detail))
    if storm["in_product_ms_max"] > 1000 * _STALL_S:
        result.findings.append(Finding(rule, f"one was held up for {storm['in_product_ms_max']} ms"))


def fault_count(faults: Counter[str]) -> int:
    """Returns how many disturbances happened."""
    return sum(faults.values())
