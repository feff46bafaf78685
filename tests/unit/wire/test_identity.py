"""Identities as URIs: each has one, and what a learner may weigh is part of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.wire.identity import LEAST_WEIGHT, MOST_WEIGHT, Identity, Role

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,20}[a-z0-9])?", fullmatch=True)
WEIGHTS = st.floats(LEAST_WEIGHT, MOST_WEIGHT).map(lambda weight: float(f"{weight:g}"))
IDENTITIES = st.one_of(
    st.builds(Identity, st.sampled_from(Role), NAMES),
    st.builds(Identity, st.just(Role.LEARNER), NAMES, st.just("") | NAMES, st.none() | WEIGHTS),
)


@given(IDENTITIES)
def test_an_identity_has_one_uri_and_a_weight_changes_not_who_it_is(identity: Identity) -> None:
    assert Identity.parse(str(identity)) == identity
    assert Identity.parse(identity.client) == Identity(identity.role, identity.name, identity.run)


@given(st.text(max_size=12) | st.from_regex(r"weight=[0-9.e+-]{0,8}", fullmatch=True))
def test_what_follows_the_name_is_a_weight_in_its_only_form_or_refused(query: str) -> None:
    uri = f"skerry://learner/run/us?{query}"
    try:
        found = Identity.parse(uri)
    except ValueError:
        return
    assert str(found) == uri
    assert found.weight is not None
    assert LEAST_WEIGHT <= found.weight <= MOST_WEIGHT


def test_a_weight_is_read_as_the_number_that_it_is() -> None:
    assert Identity.parse("skerry://learner/us?weight=8").weight == 8.0
    assert Identity.parse("skerry://learner/gpt/us?weight=2.5") == Identity(Role.LEARNER, "us", "gpt", 2.5)
    assert Identity.parse("skerry://learner/us").weight is None


@pytest.mark.parametrize(
    "query",
    ["", "weight", "weight=", "weight=0", "weight=0.9", "weight=1001", "weight=-8", "weight=nan", "weight=inf",
     "weight=08", "weight=8.0", "weight=8e0", "weight=\u0668", "weight=8?weight=9", "weight=8&weight=9", "Weight=8",
     "size=8", "weight=1.2.3", "weight=8/us"],
)  # fmt: skip
def test_no_other_form_is_a_weight(query: str) -> None:
    with pytest.raises(ValueError, match="only a learner has a weight"):
        Identity.parse(f"skerry://learner/us?{query}")


@pytest.mark.parametrize("role", [Role.ADMIN, Role.READER])
def test_only_learners_have_a_weight(role: Role) -> None:
    with pytest.raises(ValueError, match="only a learner has a weight"):
        Identity.parse(f"skerry://{role}/anna?weight=8")
