"""Learners that are killed and go on from their own checkpoint, against a real syncer: all their work counts once.

Every step adds a vector of its own, whose elements are multiples of 1/64. With plain averaging, a learner that is alone
has the sum of its steps as its weights, and the run too, but for the rounding of float32 in merges. So the weights tell
which steps they hold, and how often.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from numpy.typing import NDArray
from torch import nn

from skerry import Adoption, ArrayLearner, Learner, MergeRule, OuterOptimizer, OuterSchedule, Policy, RunsClient
from skerry.exchange import account as account_module
from skerry.exchange.states import Sending
from skerry.wire import Codec, Encoding
from tests.support.syncer_thread import syncer

SHAPES = {"embedding.weight": (40, 8), "body.weight": (8, 24), "body.bias": (24,)}
EXACT = Policy(
    inner_step_count=4,
    lease_term_s=1.0,
    outer=OuterOptimizer(learning_rate=1.0, momentum=0.0, schedule=OuterSchedule.CONSTANT),
    merge=MergeRule.MEAN,
    delta_encoding=Encoding(Codec.FLOAT32),
    update_encoding=Encoding(Codec.FLOAT32),
    quarantine_ratio=0,
)
# What merging and rebasing round: far less than any step.
ROUNDING = 2e-6
ROUGH = replace(EXACT, delta_encoding=Encoding(Codec.INT4))


def work_of(name: str, step: int) -> NDArray[np.float32]:
    """What a step adds to an array."""
    source = np.random.default_rng([step, *name.encode()])
    return (source.integers(-8, 9, SHAPES[name]) / 64).astype(np.float32)


def trained(*steps: range) -> dict[str, NDArray[np.float32]]:
    """The arrays after these steps."""
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return {name: sum((work_of(name, step) for one in steps for step in one), zero) for name, zero in zeros.items()}


class Trainee:
    """A learner whose steps are known, and who may be killed."""

    def __init__(self, target: str, learner_id: str = "a", policy: Policy = EXACT, **options: Any) -> None:
        self.arrays = trained()
        self.step = 0
        self.learner = ArrayLearner(
            self.arrays, target=target, run="fit", learner_id=learner_id, create=True, policy=policy, **options
        )

    def train(self, step_count: int) -> None:
        for _ in range(step_count):
            self.step += 1
            for name, array in self.arrays.items():
                np.add(array, work_of(name, self.step), out=array)
            self.learner.step(tokens=8)

    def idle_until(self, is_over: Callable[[], bool]) -> None:
        """Takes no step, but lets the exchange do its work."""
        deadline_s = time.monotonic() + 30
        while not self.learner._exchange.serve(is_over, 0.01):
            assert time.monotonic() < deadline_s, self.learner.stats

    def settle(self) -> None:
        """Waits until all work is merged and adopted."""
        assert self.learner._flush(lambda: self.learner._exchange.is_settled, 30, is_last=True)

    def save(self) -> dict[str, Any]:
        """What a checkpoint would hold."""
        state: dict[str, Any] = pickle.loads(pickle.dumps(self.learner.state_dict()))
        return state

    def load(self, state: dict[str, Any]) -> None:
        self.learner.load_state_dict(state)
        self.step = state["step_count"]
        assert self.learner.stats.step_count == self.step

    def kill(self) -> None:
        """Ends the exchange as kill -9 does: nothing is sent, and nobody told."""
        self.learner._stop_threads()

    def check(self, expected: dict[str, NDArray[np.float32]], atol: float = ROUNDING) -> None:
        for name, array in self.arrays.items():
            np.testing.assert_allclose(array, expected[name], rtol=0, atol=atol, err_msg=name)

    def check_at_end(self, expected: dict[str, NDArray[np.float32]], atol: float = ROUNDING) -> None:
        """Leaves, and checks the run's own weights."""
        assert self.learner.leave(30, load_merged=True)
        self.check(expected, atol)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The warnings of accounts."""
    warned: list[dict[str, Any]] = []

    def look(_logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        if method == "warning":
            warned.append(dict(event))
        raise structlog.DropEvent

    log = structlog.wrap_logger(None, processors=[look], wrapper_class=structlog.BoundLogger)
    monkeypatch.setattr(account_module, "_log", log)
    return warned


@pytest.mark.parametrize("policy", [EXACT, ROUGH], ids=["float32", "int4"])
def test_a_learner_that_is_killed_at_every_checkpoint_trains_as_if_it_never_was(
    target: str, policy: Policy, said: list[dict[str, Any]]
) -> None:
    """With int4 this is so only if the error of each encoding survives too."""
    one = Trainee(target, policy=policy)
    step_counts = np.random.default_rng(5).integers(1, 9, 16)
    for step_count in map(int, step_counts):
        one.train(step_count)
        if step_count % 2:
            time.sleep(0.02)  # so that some deltas are merged, and others on their way
        state = one.save()
        one.kill()
        one = Trainee(target)
        one.load(state)
        one.check(trained(range(1, one.step + 1)), 10 * ROUNDING)
    assert said == []
    assert one.step == sum(step_counts)
    # A last delta of int4 holds all but its own rounding, of work of about one step. On a slow machine the one before
    # may be the first that arrives, with all steps.
    one.settle()
    one.train(1)
    one.check_at_end(trained(range(1, one.step + 1)), 10 * ROUNDING if policy is EXACT else 0.1)


def test_no_delta_is_made_of_the_steps_of_a_checkpoint_before_the_next_step(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is saved would be outdated before it is written: a kill meanwhile would drop all of it."""
    one = Trainee(target)
    parameters, fragments = one.learner._exchange._session.parameters, one.learner._exchange._fragments
    keep = parameters.keep

    def kept_slowly(vector: Any) -> Any:
        time.sleep(0.002)
        return keep(vector)

    monkeypatch.setattr(parameters, "keep", kept_slowly)
    with one.learner:
        for _ in range(60):
            one.train(1)
            saved = one.save()["fragments"]
            time.sleep(0.01)
            assert {name: list(fragment.ledger.sent_until) for name, fragment in fragments.items()} == {
                name: fragment["sent_until"] for name, fragment in saved.items()
            }
        assert one.learner.stats.deltas_acknowledged > 8


def test_a_delta_that_was_never_accepted_is_sent_by_the_next_process(tmp_path: Path) -> None:
    with syncer(store_url=f"file://{tmp_path}/store") as target:
        one = Trainee(target)
        one.train(9)
        one.settle()
    one.train(10)
    fragments = one.learner._exchange._fragments.values()
    one.idle_until(lambda: any(isinstance(fragment.state, Sending) for fragment in fragments))
    state = one.save()
    assert any(saved["delta"] and saved["delta"]["delta_id"] != saved["last_delta"] for saved in parts(state))
    one.kill()
    with syncer(store_url=f"file://{tmp_path}/store") as target:
        one = Trainee(target)
        one.load(state)
        one.check(trained(range(1, 20)))
        one.train(3)
        one.check_at_end(trained(range(1, 23)))


def parts(state: dict[str, Any]) -> list[dict[str, Any]]:
    """What a state has of each fragment."""
    return list(state["fragments"].values())


WAITING = replace(EXACT, quorum_count=2)


@pytest.fixture
def in_flight(target: str) -> Iterator[tuple[dict[str, Any], Trainee]]:
    """A state whose deltas wait for a second learner, and that learner, which adds nothing."""
    one = Trainee(target, policy=WAITING, fragment_count=1)
    other = Trainee(target, "b")
    one.train(4)
    one.idle_until(lambda: one.learner.stats.deltas_acknowledged == 1)
    one.train(2)
    state = one.save()
    assert [saved["delta"]["delta_id"] for saved in parts(state)] == [saved["last_delta"] for saved in parts(state)]
    one.kill()
    with other.learner:
        yield state, other


def contribute(other: Trainee) -> None:
    """Has a learner that trains nothing close the round."""
    before = other.learner.stats.deltas_merged
    for _ in range(4):
        other.learner.step(tokens=8)
    other.idle_until(lambda: other.learner.stats.deltas_merged > before)
    other.idle_until(lambda: min(other.learner.stats.versions.values()) > 0)


@pytest.mark.parametrize("is_merged_before", [True, False])
def test_a_delta_that_is_merged_after_the_checkpoint_is_not_sent_again(
    target: str, in_flight: tuple[dict[str, Any], Trainee], is_merged_before: bool, said: list[dict[str, Any]]
) -> None:
    state, other = in_flight
    if is_merged_before:
        contribute(other)
    one = Trainee(target)
    one.load(state)
    if not is_merged_before:
        one.check(trained(range(1, 7)), 0)
        contribute(other)
    one.idle_until(lambda: min(one.learner.stats.versions.values()) == 1)
    one.idle_until(lambda: one.learner._exchange.is_settled or one.learner.stats.unsent_step_count == 2)
    # The run has a share of the first four steps, since the other learner added nothing, and the model two more.
    merged = one.learner.merged_weights()
    assert all(np.abs(array).max() > 0.1 for array in merged.values())
    one.check({name: merged[name] + array for name, array in trained(range(5, 7)).items()})
    assert one.learner.stats.unsent_step_count == 2
    assert said == []
    one.learner.close()


def test_a_delta_that_a_roll_back_expired_is_sent_again(
    target: str, in_flight: tuple[dict[str, Any], Trainee], said: list[dict[str, Any]]
) -> None:
    state, _ = in_flight
    with RunsClient(target) as client:
        client.roll_back("fit", client.get_run("fit").run.position)
    one = Trainee(target)
    one.load(state)
    one.check(trained(range(1, 7)), 0)
    assert one.learner.stats.unsent_step_count == 6
    assert said == []
    one.learner.close()


def test_a_checkpoint_that_is_older_than_the_run_adds_nothing_to_it(target: str, said: list[dict[str, Any]]) -> None:
    one = Trainee(target)
    one.train(7)
    state = one.save()
    one.train(5)
    one.settle()
    one.kill()
    again = Trainee(target)
    again.load(state)
    assert "later work" in said[0]["because"]
    assert 1 <= max(event["steps"] for event in said) <= 7
    assert {name for event in said for name in event["fragments"]} == set(state["fragments"])
    again.check(trained(range(1, 13)))
    again.train(3)
    again.check_at_end(trained(range(1, 13), range(8, 11)))


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_process_supersedes_no_delta_of_the_one_before_that_it_has_not(
    target: str, said: list[dict[str, Any]], has_checkpoint: bool
) -> None:
    one = Trainee(target, policy=WAITING, fragment_count=1)
    other = Trainee(target, "b")
    one.train(2)
    state = one.save()
    one.train(2)
    one.idle_until(lambda: one.learner.stats.deltas_acknowledged == 1)
    one.kill()
    again = Trainee(target)
    if has_checkpoint:
        again.load(state)
        assert "later work" in said[0]["because"]
    again.train(8)
    until_s = time.monotonic() + 0.5
    again.idle_until(lambda: time.monotonic() > until_s)
    assert again.learner.stats.deltas_acknowledged == 0
    with other.learner:
        contribute(other)
        again.idle_until(lambda: min(again.learner.stats.versions.values()) == 1)
        merged, sent = again.learner.merged_weights(), trained(range(1, 5))
        share = np.abs(merged["body.bias"]).max() / np.abs(sent["body.bias"]).max()
        assert share > 0.1
        for name, weights in merged.items():
            np.testing.assert_allclose(weights, share * sent[name], rtol=0, atol=ROUNDING)
        again.idle_until(lambda: again.learner.stats.deltas_acknowledged == 1)
        again.kill()


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_learner_that_is_alone_and_back_does_not_wait_for_a_short_delta_to_be_merged(
    target: str, has_checkpoint: bool
) -> None:
    one = Trainee(target, policy=replace(EXACT, inner_step_count=1000), fragment_count=1)
    one.train(2)
    one.learner._exchange.flush()
    one.idle_until(lambda: one.learner.stats.deltas_acknowledged == 1)
    state = one.save()
    one.kill()
    again = Trainee(target)
    if has_checkpoint:
        again.load(state)
    again.train(1)
    again.idle_until(lambda: min(again.learner.stats.versions.values()) == 1)
    for name, weights in again.learner.merged_weights().items():
        sent = trained(range(1, 3))[name]
        share = np.abs(weights).max() / np.abs(sent).max()
        assert share > 0
        np.testing.assert_allclose(weights, share * sent, rtol=0, atol=ROUNDING)
    again.kill()


def test_of_two_processes_with_one_checkpoint_the_newer_goes_on(target: str, said: list[dict[str, Any]]) -> None:
    one = Trainee(target)
    one.train(6)
    state = one.save()
    one.kill()
    fenced, newer = Trainee(target), Trainee(target)
    newer.load(state)
    newer.train(2)
    fenced.load(state)
    fenced.train(2)
    fenced.idle_until(lambda: fenced.learner.failure is not None)
    assert said == []
    # A learner that exchanges no more can still write its checkpoints.
    outdated = fenced.save()
    fenced.kill()
    newer.check_at_end(trained(range(1, 9)))

    last = Trainee(target)
    last.load(outdated)
    assert said[0]["because"] == "the learner did not exchange any more when it was saved"
    assert 2 <= said[0]["steps"] <= 8
    last.check_at_end(trained(range(1, 9)))


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"learner_id": "b"}, "give learner_id='a'"),
        ({"adoption": Adoption.REPLACE}, "adoption='replace'"),
    ],
)
def test_an_account_of_which_nothing_can_be_kept_is_dropped_aloud(
    target: str, said: list[dict[str, Any]], options: dict[str, Any], because: str
) -> None:
    one = Trainee(target)
    one.train(3)
    state = one.save()
    one.kill()
    other = Trainee(target, **options)
    other.load(state)
    assert because in said[0]["because"]
    assert said[0]["steps"] == 3
    other.check(trained(), 0)
    other.train(2)
    other.check_at_end(trained(range(4, 6)))


def test_an_account_of_a_run_that_was_made_anew_is_dropped(target: str, said: list[dict[str, Any]]) -> None:
    one = Trainee(target)
    one.train(3)
    state = one.save()
    one.kill()
    with RunsClient(target) as client:
        client.delete_run("fit", state["run_uid"])
    other = Trainee(target, fragment_count=1)
    other.load(state)
    assert "another run" in said[0]["because"]
    assert said[0]["steps"] == 3
    other.check(trained(), 0)
    other.learner.close()


def test_work_that_waited_for_longer_than_any_delta_may_still_counts_once(
    target: str, said: list[dict[str, Any]]
) -> None:
    """As of a learner whose link was down: the work is sent from the newest version."""
    one = Trainee(target, policy=replace(EXACT, max_staleness=2), fragment_count=1)
    one.train(3)
    state = one.save()
    one.kill()
    other = Trainee(target, "b")
    while min(other.learner.stats.versions.values()) < 8:
        other.learner.step(tokens=8)
        time.sleep(0.002)
    assert other.learner.leave(30)
    again = Trainee(target)
    again.load(state)
    again.check(trained(range(1, 4)))
    assert said == []
    again.check_at_end(trained(range(1, 4)))


def test_a_state_is_loaded_before_the_first_step_and_by_the_model_that_it_is_of(target: str) -> None:
    one = Trainee(target)
    one.train(1)
    state = one.save()
    with pytest.raises(ValueError, match="before its first step"):
        one.learner.load_state_dict(state)
    with pytest.raises(ValueError, match="before its first step"):
        one.learner.count_from(7, 70)
    one.kill()
    other = Trainee(target)
    name = min(state["fragments"])
    shorter = {**state["fragments"][name], "unsent": np.zeros(3, np.float32)}
    for broken, why in (
        ({}, "format"),
        ({**state, "format": 9}, "format=9"),
        ({**state, "fragments": {}}, "not what state_dict"),
        ({**state, "fragments": {**state["fragments"], name: shorter}}, "another model"),
    ):
        with pytest.raises(ValueError, match=why):
            other.learner.load_state_dict(broken)
    other.load(state)
    other.check(trained(range(1, 2)), 0)
    other.learner.close()


def test_float16_arrays_go_on_and_their_rounding_is_nobodys_work(target: str) -> None:
    def half() -> dict[str, NDArray[np.float16]]:
        return {"weight": np.full((7, 9), 1 / 3, np.float16)}

    options: dict[str, Any] = {"target": target, "run": "half", "learner_id": "a", "create": True, "policy": EXACT}
    arrays = half()
    learner = ArrayLearner(arrays, **options)
    arrays["weight"] += np.float16(0.25)  # to where its numbers are further apart
    learner.step(tokens=8)
    state = learner.state_dict()
    (saved,) = parts(state)
    learner._stop_threads()
    # A version that float16 can't hold.
    others = {"weight": half()["weight"].astype(np.float32)}
    with ArrayLearner(others, **{**options, "learner_id": "b"}) as other:
        others["weight"] += np.float32(3e-4)
        other.step(tokens=8)
        assert other.leave(30, load_merged=True)
    arrays = half()
    learner = ArrayLearner(arrays, **options)
    learner.load_state_dict(state)
    (again,) = parts(learner.state_dict())
    np.testing.assert_allclose(again["unsent"], saved["unsent"], rtol=0, atol=1e-7)
    learner.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_torch_checkpoint_holds_the_state(target: str, tmp_path: Path, dtype: torch.dtype) -> None:
    def begun() -> tuple[nn.Linear, Learner]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4).to(dtype)
        return model, Learner(model, target=target, run="torch", learner_id="a", create=True, policy=EXACT)

    model, learner = begun()
    for _ in range(3):
        with torch.no_grad():
            model.weight.add_(0.25)
        learner.step(tokens=8)
    torch.save({"skerry": learner.state_dict()}, tmp_path / "checkpoint.pt")
    before = {name: one.clone() for name, one in model.state_dict().items()}
    learner._stop_threads()
    model, learner = begun()
    learner.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["skerry"])
    for name, one in model.state_dict().items():
        torch.testing.assert_close(one, before[name], rtol=0, atol=ROUNDING)
    assert learner.stats.step_count == learner.stats.unsent_step_count == 3
    assert learner.leave(30)
