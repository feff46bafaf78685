"""The fold of small histories by hand: every kind of item, what it does, and what makes it have no effect."""

import msgspec
import pytest

from skerry.wire.policy import Policy
from skerry_syncer.store.errors import LogCorruptError
from skerry_syncer.store.log.checkpoints import state_from_bytes, state_to_bytes
from skerry_syncer.store.log.entries import (
    AcceptedItem,
    CollectedItem,
    Decided,
    Entry,
    Fate,
    FateItem,
    Item,
    LeftItem,
    PolicyItem,
    RollbackItem,
    RunStatus,
    SessionItem,
    StatusItem,
)
from skerry_syncer.store.log.fold import apply_entry, check_item
from tests.support.history import (
    BODY,
    EMBED,
    SPEC,
    History,
    accepted,
    closed,
    committed,
    committed_round,
    ejection,
    fingerprint,
    ref,
    rolled_back,
    snapshot,
)


@pytest.fixture
def draft() -> History:
    return History()


@pytest.fixture
def history() -> History:
    return History.opened()


def test_initial_weights_come_by_push_and_become_version_0_by_their_snapshot(draft: History) -> None:
    draft.admit(accepted("a", base=-1))
    draft.admit(accepted("b", "m1", base=-1))
    assert draft.admit(snapshot(0)) == ("a", "b")
    assert draft.fate("a") == (Fate.MERGED, "")
    assert draft.fate("b") == (Fate.EXPIRED, "another push brought the initial weights")
    assert draft.state.fragments[BODY].version == 0
    assert draft.reject(snapshot(0)) == "VERSION_NOT_FOUND"


def test_a_draft_opens_when_every_fragment_has_its_weights(draft: History) -> None:
    draft.admit(snapshot(0))
    assert draft.reject(StatusItem(RunStatus.OPEN)) == "RUN_DRAFT"
    draft.admit(snapshot(0, EMBED))
    draft.admit(StatusItem(RunStatus.OPEN))
    assert draft.reject(StatusItem(RunStatus.OPEN)) == "RUN_CLOSED"
    assert draft.reject(accepted("a", base=-1)) == "RUN_EXISTS"


def test_a_draft_takes_neither_learners_nor_deltas(draft: History) -> None:
    assert draft.reject(SessionItem("m0", "m0-s1", "")) == "RUN_DRAFT"
    assert draft.reject(accepted("a")) == "RUN_DRAFT"


def test_a_round_goes_from_accepted_to_closed_to_committed(history: History) -> None:
    assert history.admit(accepted("a")) == ()
    history.admit(accepted("b", "m1"))
    assert history.admit(closed("a", "b")) == ()
    assert list(history.state.fragments[BODY].pending) == []
    assert history.fate("a") == (Fate.PENDING, "")
    assert history.admit(committed()) == ("a", "b")
    fragment, delta = history.state.fragments[BODY], history.state.deltas["a"]
    assert (fragment.version, fragment.closing) == (1, None)
    assert (delta.fate, delta.version, delta.weight_share) == (Fate.MERGED, 1, 0.5)
    assert history.state.fragments[EMBED].version == 0


def test_the_run_is_as_far_as_the_tokens_of_all_learners_on_the_mean_of_its_fragments(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(msgspec.structs.replace(accepted("b", "m1"), token_count=3000))
    committed_round(history, "a", "b")
    assert history.state.fragments[BODY].newest.token_count == 4000
    assert history.state.token_count == 2000


def test_a_token_count_that_must_be_wrong_does_not_end_the_plan(history: History) -> None:
    history.admit(SessionItem("m2", "m2-s1", ""))
    for delta, learner, token_count in (("a", "m0", 1000), ("b", "m1", 3000), ("c", "m2", 10**6)):
        history.admit(msgspec.structs.replace(accepted(delta, learner), token_count=token_count))
    committed_round(history, "a", "b", "c")
    assert history.state.fragments[BODY].newest.token_count == 1000 + 3000 + 2000


def test_tokens_are_held_against_those_who_work_and_not_against_those_who_left(history: History) -> None:
    history.add(SessionItem("m2", "m2-s1", "here"))
    for number, learner in enumerate(("m1", "m2")):
        history.admit(msgspec.structs.replace(accepted(f"small {number}", learner), token_count=8))
    committed_round(history, "small 0", "small 1")
    history.admit(LeftItem("m1", "m1-s1"))
    history.admit(LeftItem("m2", "m2-s1"))
    history.admit(msgspec.structs.replace(accepted("large", base=1), token_count=10_000))
    committed_round(history, "large", version=2)
    assert history.state.fragments[BODY].newest.token_count == 16 + 10_000


def test_all_tokens_of_a_long_outage_count_for_the_plan(history: History) -> None:
    history.add(SessionItem("m2", "m2-s1", "here"))
    for number, learner in enumerate(("m0", "m1", "m2")):
        long = msgspec.structs.replace(
            accepted(f"long {number}", learner, base=number), step_count=6000, last_step=6000, token_count=600_000
        )
        history.admit(long)
        committed_round(history, f"long {number}", version=number + 1)
    assert history.state.fragments[BODY].newest.token_count == 3 * 600_000


def test_a_repeated_delta_counts_once_and_other_bytes_under_its_id_are_refused(history: History) -> None:
    history.admit(accepted("a"))
    assert history.reject(accepted("a")) == "REPEATED"
    assert history.reject(msgspec.structs.replace(accepted("a"), digest="other")) == "ID_REUSED"
    committed_round(history, "a")
    assert history.reject(accepted("a")) == "REPEATED"


def test_a_base_has_one_delta_and_is_free_again_if_that_was_given_up_but_not_if_it_was_merged(history: History) -> None:
    history.admit(accepted("a"))
    assert history.reject(accepted("b")) == "BASE_REPEATED"
    history.admit(accepted("of another fragment", fragment=EMBED))
    assert history.admit(FateItem((Decided("a", Fate.QUARANTINED, "outlier"),))) == ("a",)
    assert history.reject(closed("a")) == "BAD_REQUEST"
    history.admit(accepted("b"))
    assert history.reject(accepted("c")) == "BASE_REPEATED"
    committed_round(history, "b")
    assert history.reject(accepted("c", base=0)) == "BASE_REPEATED"


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (accepted("x", base=1), "BASE_FUTURE"),
        (msgspec.structs.replace(accepted("x"), base_digest="elsewhere"), "BASE_FOREIGN"),
        (accepted("x", base=-2), "BASE_FOREIGN"),
        (accepted("x", "m9"), "SESSION_UNKNOWN"),
        (accepted("x", session="never seen"), "SESSION_UNKNOWN"),
        (accepted("x", fragment="other"), "FRAGMENT_NOT_FOUND"),
    ],
)
def test_a_delta_from_nowhere_has_no_effect(history: History, item: AcceptedItem, reason: str) -> None:
    assert history.reject(item) == reason


def test_a_base_may_be_as_old_as_the_policy_says_and_no_older(history: History) -> None:
    history.admit(PolicyItem("request", Policy(max_staleness=1)))
    history.admit(accepted("a"))
    committed_round(history, "a")
    history.admit(accepted("b", "m1"))
    committed_round(history, "b", version=2)
    history.admit(SessionItem("m2", "m2-s1", ""))
    assert history.reject(accepted("c", "m2")) == "BASE_STALE"
    history.admit(accepted("d", "m2", base=1))


def test_a_new_session_fences_the_older_for_ever(history: History) -> None:
    history.admit(SessionItem("m0", "m0-s2", "here"))
    assert history.reject(accepted("a")) == "SESSION_FENCED"
    assert history.reject(SessionItem("m0", "m0-s1", "here")) == "SESSION_FENCED"
    assert history.reject(LeftItem("m0", "m0-s1")) == "SESSION_FENCED"
    history.admit(accepted("b", session="m0-s2"))


def test_a_session_may_attach_again_and_leave_once(history: History) -> None:
    history.admit(LeftItem("m0", "m0-s1"))
    assert history.reject(LeftItem("m0", "m0-s1")) == "SESSION_FENCED"
    history.admit(SessionItem("m0", "m0-s1", "here"))
    assert history.reject(SessionItem("m0", "m0-s1", "here")) == "REPEATED"
    history.admit(LeftItem("m0", "m0-s1"))
    assert history.reject(LeftItem("nobody", "s")) == "SESSION_FENCED"


def test_a_new_sessions_delta_supersedes_what_the_old_one_left_pending(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(SessionItem("m0", "m0-s2", "here"))
    assert history.admit(accepted("b", session="m0-s2")) == ("a",)
    assert history.fate("a")[0] is Fate.SUPERSEDED


def test_a_frozen_delta_is_not_superseded(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(closed("a"))
    history.admit(SessionItem("m0", "m0-s2", "here"))
    assert history.admit(accepted("b", session="m0-s2")) == ()
    assert history.admit(committed()) == ("a",)


def test_the_second_close_and_the_second_commit_of_a_round_have_no_effect(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(accepted("b", "m1"))
    history.admit(closed("a"))
    assert history.reject(closed("b")) == "VERSION_NOT_FOUND"
    history.admit(committed())
    assert history.reject(committed()) == "VERSION_NOT_FOUND"
    history.admit(closed("b", version=2))


@pytest.mark.parametrize(
    "item",
    [
        closed(),
        closed("a", "a"),
        closed("a", "missing"),
        closed("a", decided=(Decided("a", Fate.EXPIRED, ""),)),
        closed("a", decided=(Decided("missing", Fate.EXPIRED, ""),)),
        closed("a", decided=(Decided("b", Fate.EXPIRED, ""), Decided("b", Fate.QUARANTINED, ""))),
        closed("a", decided=(Decided("b", Fate.MERGED, ""),)),
        closed("a", decided=(Decided("b", Fate.PENDING, ""),)),
        FateItem((Decided("missing", Fate.EXPIRED, ""),)),
        FateItem((Decided("a", Fate.EXPIRED, ""), Decided("a", Fate.EXPIRED, ""))),
        FateItem((Decided("a", Fate.MERGED, ""),)),
    ],
)
def test_a_malformed_decision_has_no_effect(history: History, item: Item) -> None:
    history.admit(accepted("a"))
    history.admit(accepted("b", "m1"))
    assert history.reject(item) == "BAD_REQUEST"


def test_a_close_decides_whom_it_leaves_out(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(accepted("b", "m1"))
    assert history.admit(closed("a", decided=(Decided("b", Fate.EXPIRED, "too stale"),))) == ("b",)
    assert history.fate("b") == (Fate.EXPIRED, "too stale")
    assert history.state.learners["m1"].fates == {Fate.EXPIRED: {"too stale": 1}}
    assert history.reject(FateItem((Decided("b", Fate.EXPIRED, "again"),))) == "BAD_REQUEST"
    assert history.reject(FateItem((Decided("a", Fate.EXPIRED, "frozen"),))) == "BAD_REQUEST"


def test_a_set_that_cannot_be_read_is_closed_again_without_the_bad_delta(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(accepted("b", "m1"))
    history.admit(closed("a", "b"))
    assert history.reject(closed("a", attempt=1)) == "BAD_REQUEST"  # b would be forgotten
    bad = (Decided("b", Fate.QUARANTINED, "can't be read"),)
    assert history.admit(closed("a", attempt=1, decided=bad)) == ("b",)
    assert history.reject(committed(attempt=0)) == "VERSION_NOT_FOUND"
    assert history.admit(committed(attempt=1)) == ("a",)


def test_a_round_whose_every_delta_is_bad_is_void_and_the_next_takes_the_next_attempt(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(accepted("b", "m1"))
    history.admit(closed("a"))
    history.admit(closed(attempt=1, decided=(Decided("a", Fate.QUARANTINED, "can't be read"),)))
    assert history.reject(committed(attempt=0)) == history.reject(committed(attempt=1)) == "VERSION_NOT_FOUND"
    assert history.reject(closed("b")) == "VERSION_NOT_FOUND"
    history.admit(closed("b", attempt=2))
    assert history.admit(committed(attempt=2)) == ("b",)


def test_a_version_has_one_snapshot_of_its_own_content(history: History) -> None:
    assert history.reject(snapshot(1)) == "VERSION_NOT_FOUND"
    history.admit(accepted("a"))
    committed_round(history, "a")
    assert history.reject(msgspec.structs.replace(snapshot(1), digest="other")) == "VERSION_NOT_FOUND"
    history.admit(snapshot(1))
    assert history.reject(snapshot(1)) == "VERSION_NOT_FOUND"


def test_a_roll_back_gives_the_next_version_older_content_and_expires_what_waits(history: History) -> None:
    history.admit(accepted("a"))
    committed_round(history, "a")
    history.admit(accepted("b", base=1))
    history.admit(closed("b", version=2))
    history.admit(accepted("c", "m1", base=1))
    assert sorted(history.admit(rolled_back("request", 0, 2))) == ["b", "c"]
    fragment = history.state.fragments[BODY]
    assert (fragment.version, fragment.newest.source_version, fragment.newest.digest) == (2, 0, f"{BODY}-0")
    assert [fragment.versions[version].is_abandoned for version in (0, 1, 2)] == [False, True, False]
    assert [fragment.versions[version].token_count for version in (0, 1, 2)] == [0, 1000, 0]
    assert (fragment.momentum_from, fragment.closing) == (fragment.newest.step_count, None)
    assert history.reject(committed(2)) == "VERSION_NOT_FOUND"
    history.admit(SessionItem("m2", "m2-s1", ""))
    assert history.reject(accepted("d", "m2", base=1)) == "BASE_STALE"
    history.admit(accepted("e", "m2", base=0))
    assert history.state.fragments[EMBED].version == 0


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (rolled_back("used", 0, 2), "ID_REUSED"),
        (rolled_back("new", 0, 1), "VERSION_NOT_FOUND"),
        (rolled_back("new", 0, 3), "VERSION_NOT_FOUND"),
        (rolled_back("new", 7, 2), "VERSION_NOT_FOUND"),
        (rolled_back("new", 0, 2, "other"), "FRAGMENT_NOT_FOUND"),
        (RollbackItem("new", 1, rolled_back("new", 0, 2).fragments * 2), "BAD_REQUEST"),
    ],
)
def test_a_roll_back_that_does_not_fit_has_no_effect(history: History, item: RollbackItem, reason: str) -> None:
    history.admit(rolled_back("used", 0, 1))
    assert history.reject(item) == reason


def test_nothing_that_the_newest_versions_need_is_condemned(history: History) -> None:
    history.admit(accepted("a"))
    committed_round(history, "a")
    history.admit(accepted("b", base=1))
    needed = (f"snapshots/{BODY}/0", f"updates/{BODY}/1-0", f"deltas/{BODY}/a/part", f"deltas/{BODY}/b/part")
    assert history.state.referenced_names() == {*needed, f"snapshots/{EMBED}/0"}
    for name in needed:
        assert history.reject(CollectedItem((name, "litter"))) == "BAD_REQUEST"
    history.admit(snapshot(1))
    history.admit(CollectedItem(needed[:3]))
    assert history.reject(CollectedItem(needed[3:])) == "BAD_REQUEST"


def test_what_was_condemned_cannot_be_named_any_more(history: History) -> None:
    part, update, weights = f"deltas/{BODY}/b/part", f"updates/{BODY}/1-0", f"snapshots/{BODY}/0-late"
    history.admit(accepted("a"))
    history.admit(closed("a"))
    history.admit(CollectedItem((part, update, weights, f"snapshots/{BODY}/1", f"snapshots/{BODY}/2-back")))
    assert history.reject(accepted("b", "m1")) == "INCOMPLETE"
    assert history.reject(committed()) == "INCOMPLETE"
    anew = msgspec.structs.replace(committed(), update=(ref("updates/body/1-anew"),))
    history.admit(anew)
    assert history.reject(snapshot(1)) == "INCOMPLETE"
    assert history.reject(rolled_back("request", 0, 2)) == "INCOMPLETE"


def test_a_closing_run_merges_what_it_has_and_a_closed_one_has_decided_everything(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(accepted("b", "m1"))
    assert history.reject(StatusItem(RunStatus.CLOSED)) == "RUN_CLOSED"
    history.admit(StatusItem(RunStatus.CLOSING))
    for item in (accepted("c", fragment=EMBED), SessionItem("m2", "s", ""), PolicyItem("late", Policy())):
        assert history.reject(item) == "RUN_CLOSED"
    history.admit(closed("a"))
    assert history.reject(StatusItem(RunStatus.CLOSED)) == "RUN_CLOSED"
    history.admit(committed())
    assert history.admit(StatusItem(RunStatus.CLOSED)) == ("b",)
    assert history.fate("b") == (Fate.EXPIRED, "the run was closed")
    assert history.reject(closed("b", version=2)) == "VERSION_NOT_FOUND"
    assert history.reject(rolled_back("late", 0, 2)) == "RUN_CLOSED"


def test_a_closing_run_is_rolled_back_so_that_it_can_end_without_a_state_that_is_lost(history: History) -> None:
    history.admit(accepted("a"))
    history.admit(closed("a"))
    history.admit(StatusItem(RunStatus.CLOSING))
    assert history.admit(rolled_back("request", 0, 1)) == ("a",)
    assert history.admit(StatusItem(RunStatus.CLOSED)) == ()


def test_an_entry_of_another_run_position_or_chain_is_no_next_entry(history: History) -> None:
    state = history.state
    good = Entry(state.position + 1, SPEC.uid, state.head_digest, "w", "0" * 32, 0.0, ())
    for bad in (
        msgspec.structs.replace(good, run_uid="b" * 32),
        msgspec.structs.replace(good, position=state.position),
        msgspec.structs.replace(good, position=state.position + 2),
        msgspec.structs.replace(good, previous="0" * 64),
    ):
        with pytest.raises(LogCorruptError):
            apply_entry(state, bad, bad.to_bytes())
    assert apply_entry(state, good, good.to_bytes()) == ()


def test_of_an_ejected_learner_nothing_is_merged_any_more_and_others_go_on(history: History) -> None:
    history.admit(accepted("theirs"))
    history.admit(accepted("ours", "m1"))
    history.admit(closed("theirs", "ours"))
    history.admit(accepted("elsewhere", fragment=EMBED))
    assert history.admit(ejection("e1", "m0")) == ("elsewhere", "theirs")
    assert history.fate("theirs") == history.fate("elsewhere") == (Fate.EXPIRED, "its learner was ejected")
    assert history.reject(committed()) == "VERSION_NOT_FOUND", "the merge of a set with its delta comes too late"
    assert history.reject(accepted("again")) == "EJECTED"
    assert history.reject(SessionItem("m0", "m0-s2", "here")) == "EJECTED"
    assert history.state.learners["m0"].has_left, "no round waits for it"
    history.admit(closed("ours", attempt=1))
    assert history.admit(committed(attempt=1)) == ("ours",)


def test_an_ejection_leaves_a_frozen_set_alone_that_has_no_delta_of_the_learner(history: History) -> None:
    history.admit(accepted("theirs"))
    history.admit(accepted("ours", "m1"))
    history.admit(closed("ours"))
    assert history.admit(ejection("e1", "m0")) == ("theirs",)
    assert history.admit(committed()) == ("ours",)


def test_a_state_with_a_set_that_an_ejection_has_broken_up_is_saved_whole(history: History) -> None:
    for delta, learner in (("theirs", "m0"), ("ours", "m1")):
        history.admit(accepted(delta, learner))
    history.admit(closed("theirs", "ours"))
    history.admit(SessionItem("m2", "m2-s1", "here"))
    history.admit(accepted("late", "m2"))
    history.admit(ejection("e1", "m0"))
    assert list(history.state.fragments[BODY].pending) == ["ours", "late"], "in the order of the log"
    assert fingerprint(state_from_bytes(state_to_bytes(history.state), SPEC)) == fingerprint(history.state)


def test_a_learner_that_is_readmitted_attaches_and_contributes_again(history: History) -> None:
    history.admit(ejection("e1", "m0"))
    history.admit(ejection("e2", "m0", is_ejected=False))
    history.admit(SessionItem("m0", "m0-s1", "here"))
    history.admit(accepted("a"))
    committed_round(history, "a")


def test_an_ejection_counts_once_and_only_of_a_learner_that_was_there(history: History) -> None:
    assert history.reject(ejection("e1", "m0", is_ejected=False)) == "REPEATED"
    history.admit(ejection("e1", "m0"))
    assert history.reject(ejection("e2", "m0")) == "REPEATED"
    history.admit(ejection("e3", "m0", is_ejected=False))
    assert history.reject(ejection("e1", "m0")) == "ID_REUSED", "a repeated call ejects nobody who was readmitted"
    rejection = check_item(history.state, ejection("e4", "m7"))
    assert rejection is not None
    assert rejection.reason == "LEARNER_NOT_FOUND"
    assert "known=m0, m1" in rejection.detail


def contributed(history: History, version: int) -> dict[tuple[str, str], tuple[float, ...]]:
    rows = history.state.fragments[BODY].versions[version].contributions
    return {(row.learner, row.organisation): tuple(row[2:]) for row in rows}


def test_a_version_knows_what_was_contributed_to_all_rounds_that_led_to_it(history: History) -> None:
    history.admit(SessionItem("m0", "m0-s2", "here", "Lab"))
    history.admit(SessionItem("m2", "m2-s1", "here", "Lab"))
    for delta, learner in (("a", "m1"), ("b", "m2")):
        history.admit(accepted(delta, learner))
    history.admit(accepted("c", session="m0-s2"))
    committed_round(history, "a", "b")
    first = contributed(history, 1)
    one = (1000, 24, 0.5, 1)
    assert first == {("m1", ""): one, ("", ""): one, ("m2", "Lab"): one, ("", "Lab"): one}
    history.admit(accepted("d", "m2", base=1))
    committed_round(history, "c", "d", version=2)
    assert contributed(history, 2) == {
        **first,
        ("m0", "Lab"): one,
        ("m2", "Lab"): (2000, 48, 1.0, 2),
        ("", "Lab"): (3000, 72, 1.5, 2),
    }
    for version, source, expected in ((3, 1, first), (4, 2, contributed(history, 2)), (5, 0, {})):
        history.admit(rolled_back(f"to {source}", source, version))
        assert contributed(history, version) == expected, "a roll-back gives back what it was at its target"
    saved = state_from_bytes(state_to_bytes(history.state), SPEC)
    assert saved.fragments[BODY].versions == history.state.fragments[BODY].versions
