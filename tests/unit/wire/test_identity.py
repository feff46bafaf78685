"""Identities as URIs: each has one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.wire.identity import Identity, Role

NAMES = st.from_regex(r"[a-z0-9]([a-z0-9_-]{0,20}[a-z0-9])?", fullmatch=True)
IDENTITIES = st.one_of(
    st.builds(Identity, st.sampled_from(Role), NAMES),
    st.builds(Identity, st.just(Role.LEARNER), NAMES, st.just("") | NAMES),
)


@given(IDENTITIES)
def test_an_identity_has_one_uri(identity: Identity) -> None:
    assert Identity.parse(str(identity)) == identity


def test_a_learner_may_be_bound_to_a_run() -> None:
    assert Identity.parse("skerry://learner/gpt/us") == Identity(Role.LEARNER, "us", "gpt")
    assert Identity.parse("skerry://learner/us") == Identity(Role.LEARNER, "us")


def test_an_identity_of_spiffe_has_a_domain_and_names_skerry() -> None:
    assert Identity.parse("spiffe://train.example/skerry/learner/gpt/us") == Identity(Role.LEARNER, "us", "gpt")
    assert Identity.parse("spiffe://train.example/skerry/admin/anna") == Identity(Role.ADMIN, "anna")


@pytest.mark.parametrize(
    "uri",
    [
        "spiffe://train.example/learner/us",
        "spiffe:///skerry/learner/us",
        "spiffe://a/skerry/spiffe://a/skerry/learner/us",
        "skerry://spiffe://a/skerry/learner/us",
        "https://learner/us",
        "skerry://owner/us",
        "skerry://admin/gpt/anna",
        "skerry://learner/",
        "skerry://learner/us?weight=8",
    ],
)
def test_any_other_uri_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match="not"):
        Identity.parse(uri)
