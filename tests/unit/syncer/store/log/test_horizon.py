"""What the fold forgets at a checkpoint, and that nothing late takes effect because of it."""

import pytest

from skerry.wire.policy import Policy
from skerry_syncer.store.log.entries import (
    CheckpointItem,
    CollectedItem,
    Decided,
    Fate,
    FateItem,
    PolicyItem,
    RunStatus,
    SessionItem,
    StatusItem,
)
from skerry_syncer.store.log.retention import LEAST_VERSIONS, REMEMBERED_REQUESTS, REMEMBERED_SESSIONS, oldest_versions
from skerry_syncer.store.log.saved import state_from_bytes, state_to_bytes
from skerry_syncer.store.log.state import RunState
from tests.support.history import (
    BODY,
    EMBED,
    SPEC,
    History,
    accepted,
    closed,
    committed,
    committed_round,
    rolled_back,
    snapshot,
)

VERSIONS = 12


def checkpoint(history: History, **oldest: int) -> CheckpointItem:
    position = history.state.position
    return CheckpointItem(position, f"checkpoints/{position:020}-{'0' * 32}", 1, "0" * 64, oldest)


@pytest.fixture(params=[True, False], ids=["forgets", "keeps the history"])
def history(request: pytest.FixtureRequest) -> History:
    """An open run with versions 0 to 12 of one fragment, a delta of m0 in each and a snapshot."""
    made = History()
    made.state = RunState(SPEC, forgets=request.param)
    made.admit(snapshot(0, EMBED))
    made.admit(snapshot(0))
    made.admit(StatusItem(RunStatus.OPEN))
    made.admit(SessionItem("m0", "m0-s1", "here"))
    made.admit(SessionItem("m1", "m1-s1", "there"))
    for version in range(1, VERSIONS + 1):
        if version == 1:
            made.admit(accepted("of m1", "m1"))
        made.admit(accepted(f"d{version}", base=version - 1))
        committed_round(made, *(["of m1"] if version == 1 else []), f"d{version}", version=version)
        made.admit(snapshot(version))
    return made


def test_older_versions_and_what_went_into_them_are_forgotten(history: History) -> None:
    before = len(state_to_bytes(history.state))
    history.admit(checkpoint(history, body=8))
    body = history.state.fragments[BODY]
    assert [number for number in body.versions if body.remembered(number)] == list(range(8, VERSIONS + 1))
    known = [name for name in history.state.deltas if history.state.delta(name)]
    assert known == ["of m1", *(f"d{version}" for version in range(8, VERSIONS + 1))]
    if history.state.forgets:
        assert list(body.versions) == list(range(8, VERSIONS + 1))
        assert list(history.state.deltas) == known
        assert len(state_to_bytes(history.state)) < 0.7 * before
    else:
        assert len(body.versions) == VERSIONS + 1


def test_a_late_repeat_of_a_forgotten_delta_is_refused_by_its_base(history: History) -> None:
    assert history.reject(accepted("d3", base=2)) == "REPEATED"
    history.admit(checkpoint(history, body=8))
    assert history.reject(accepted("d3", base=2)) == "BASE_STALE"
    assert history.reject(accepted("another id", base=2)) == "BASE_STALE"
    assert history.reject(accepted("of m1", "m1")) == "REPEATED", "the last delta of a learner is remembered"
    assert history.state.deltas["of m1"].fate is Fate.MERGED


def test_a_learners_last_delta_is_forgotten_when_another_follows_it(history: History) -> None:
    history.admit(checkpoint(history, body=8))
    history.admit(accepted("next of m1", "m1", base=VERSIONS))
    assert history.reject(accepted("of m1", "m1")) == "BASE_STALE"
    history.admit(checkpoint(history, body=9))
    assert ("of m1" in history.state.deltas) == (not history.state.forgets)


def test_an_expired_delta_is_remembered_while_its_base_is(history: History) -> None:
    history.admit(accepted("given up", "m1", base=9))
    history.admit(FateItem((Decided("given up", Fate.EXPIRED, "why not"),)))
    history.admit(accepted("again", "m1", base=9))
    history.admit(checkpoint(history, body=9))
    assert history.reject(accepted("given up", "m1", base=9)) == "REPEATED"
    history.admit(FateItem((Decided("again", Fate.EXPIRED, "why not"),)))
    history.admit(checkpoint(history, body=10))
    assert history.reject(accepted("given up", "m1", base=9)) == "BASE_STALE"


def test_the_base_of_a_pending_or_frozen_delta_is_not_forgotten(history: History) -> None:
    history.admit(accepted("late", "m1", base=5))
    history.admit(checkpoint(history, body=8))
    assert history.state.fragments[BODY].oldest == 5
    history.admit(closed("late", version=VERSIONS + 1))
    history.admit(checkpoint(history, body=8))
    assert history.state.fragments[BODY].oldest == 5
    history.admit(committed(VERSIONS + 1))
    history.admit(checkpoint(history, body=8))
    assert history.state.fragments[BODY].oldest == 8


def test_the_snapshot_that_the_oldest_version_is_rebuilt_from_is_not_forgotten(history: History) -> None:
    names = tuple(f"snapshots/{BODY}/{version}" for version in (6, 7, 8))
    history.admit(CollectedItem(names))
    history.admit(checkpoint(history, body=8))
    assert history.state.fragments[BODY].oldest == 5


def test_the_horizon_never_moves_back_or_past_the_newest_version(history: History) -> None:
    history.admit(checkpoint(history, body=99))
    assert history.state.fragments[BODY].oldest == VERSIONS
    history.admit(checkpoint(history, body=3))
    assert history.state.fragments[BODY].oldest == VERSIONS


def test_what_belongs_to_a_forgotten_version_has_no_effect(history: History) -> None:
    history.admit(CollectedItem((f"snapshots/{BODY}/3",)))
    history.admit(checkpoint(history, body=8))
    assert history.reject(snapshot(4)) == "VERSION_NOT_FOUND"
    assert history.reject(rolled_back("r", 4, VERSIONS + 1)) == "VERSION_NOT_FOUND"
    history.admit(rolled_back("r", 9, VERSIONS + 1))


def test_condemned_names_are_forgotten_with_the_versions_of_their_time(history: History) -> None:
    history.admit(CollectedItem((f"deltas/{BODY}/of a slow push/part", "deltas/embed/of another/part")))
    slow = accepted("of a slow push", base=VERSIONS)
    assert history.reject(slow) == "INCOMPLETE"
    history.admit(checkpoint(history, body=VERSIONS, embed=0))
    assert history.reject(slow) == "INCOMPLETE", "its base may still be pushed from"
    history.admit(accepted("next", "m1", base=VERSIONS))
    committed_round(history, "next", version=VERSIONS + 1)
    history.admit(snapshot(VERSIONS + 1))
    history.admit(checkpoint(history, body=VERSIONS + 1, embed=0))
    assert history.reject(slow) == "BASE_STALE", "its base is forgotten, and its part may be"
    if history.state.forgets:
        assert list(history.state.condemned) == ["deltas/embed/of another/part"]


def test_old_sessions_and_requests_are_forgotten(history: History) -> None:
    for number in range(REMEMBERED_SESSIONS + 10):
        history.admit(SessionItem("m0", f"session {number}", "here"))
    history.add(*(PolicyItem(f"{number:032x}", Policy()) for number in range(REMEMBERED_REQUESTS + 10)))
    history.admit(checkpoint(history, body=8))
    assert len(history.state.learners["m0"].sessions) == REMEMBERED_SESSIONS
    assert history.reject(SessionItem("m0", "session 20", "here")) == "SESSION_FENCED"
    assert len(history.state.requests) == REMEMBERED_REQUESTS
    assert history.reject(PolicyItem(f"{100:032x}", Policy())) == "ID_REUSED"


def test_a_checkpoint_is_newer_than_the_last_and_of_a_run_that_allows_it(history: History) -> None:
    first = checkpoint(history, body=8)
    history.admit(first)
    assert history.reject(first) == "REPEATED"
    draft = History()
    draft.admit(snapshot(0, EMBED))
    draft.admit(snapshot(0))
    assert draft.reject(checkpoint(draft, body=0)) == "RUN_DRAFT"


def test_a_writer_asks_to_forget_only_what_is_no_base_any_more(history: History) -> None:
    assert oldest_versions(history.state) == {EMBED: 0, BODY: VERSIONS - 9}, "a base may be 8 rounds old"
    history.admit(PolicyItem("p", Policy(max_staleness=11)))
    assert oldest_versions(history.state)[BODY] == 0
    history.admit(PolicyItem("q", Policy(max_staleness=0)))
    assert oldest_versions(history.state)[BODY] == VERSIONS - LEAST_VERSIONS


def test_the_state_goes_into_bytes_and_back() -> None:
    made = History()
    made.state = RunState(SPEC, forgets=True)
    for item in (snapshot(0, EMBED), snapshot(0), StatusItem(RunStatus.OPEN), SessionItem("m0", "m0-s1", "here")):
        made.admit(item)
    made.admit(accepted("a"))
    committed_round(made, "a")
    made.admit(accepted("b", base=1))
    made.admit(closed("b", version=2))
    made.admit(SessionItem("m1", "m1-s1", "there"))
    made.admit(accepted("c", "m1", base=1))
    made.admit(CollectedItem(("deltas/body/litter/part",)))
    made.admit(PolicyItem("p", Policy(max_staleness=3)))
    made.admit(checkpoint(made, body=1))
    data = state_to_bytes(made.state)
    again = state_from_bytes(data, SPEC)
    assert state_to_bytes(again) == data
    assert vars(again).keys() == vars(made.state).keys()
    for name, value in vars(made.state).items():
        assert vars(again)[name] == value, name
    assert again.fragments[BODY].pending["c"] is again.deltas["c"]
