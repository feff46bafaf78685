"""The identity of a client and its role, as its certificate or its token states them.

    skerry://admin/NAME          administers runs, and reads
    skerry://learner/ID          attaches and pushes as the learner ID in any run, creates runs, and reads
    skerry://learner/RUN/ID      does so in the run RUN only
    skerry://reader/NAME         reads

A learner's may end in ?weight=G, as in skerry://learner/us?weight=8: in a round it counts for up to G times as much as
the others' median, whatever the run's policy says of the others.

Certificates hold the URI as a subject alternative name, the store's records of tokens as text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from skerry.wire.layout import check_name

SCHEME: Final = "skerry://"
# What a learner may be granted: the range of the policy's cap.
LEAST_WEIGHT: Final = 1
MOST_WEIGHT: Final = 1_000
_WEIGHT: Final = re.compile(r"weight=([0-9]{1,4}(?:\.[0-9]{1,5})?)")


class Role(StrEnum):
    """What a client is allowed to do; `skerry_syncer.access.roles` says which calls that means."""

    ADMIN = "admin"
    LEARNER = "learner"
    READER = "reader"


@dataclass(frozen=True)
class Identity:
    """One client; `str()` is its URI."""

    role: Role
    name: str  # of a learner: its id
    run: str = ""  # the only run that a learner may use; empty: any
    weight: float | None = None  # that a learner is granted; None: the run's policy says what it may weigh

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Returns the identity that a URI names.

        Raises:
            ValueError: the URI names none.
        """
        client, mark, query = uri.partition("?")
        role, _, path = client.removeprefix(SCHEME).partition("/")
        if not uri.startswith(SCHEME) or role not in Role.__members__.values():
            raise ValueError(f"not the URI of a client of Skerry. uri={uri[:200]!r}")
        run, slash, name = path.rpartition("/") if role == Role.LEARNER else ("", "", path)
        found = cls(Role(role), check_name(name, role), check_name(run, "run") if slash else "")
        return replace(found, weight=_weight(role, query)) if mark else found

    @property
    def client(self) -> str:
        """Its URI without a weight: the same for all certificates and tokens of the client."""
        return f"{SCHEME}{self.role}/{self.run}{'/' if self.run else ''}{self.name}"

    def __str__(self) -> str:
        return self.client if self.weight is None else f"{self.client}?weight={self.weight:g}"


def _weight(role: str, query: str) -> float:
    """Returns G of the URI of a client in that role."""
    digits = _WEIGHT.fullmatch(query)
    weight = float(digits[1]) if digits else 0.0
    # One form for each value, so that equal identities have equal URIs.
    if role != Role.LEARNER or not LEAST_WEIGHT <= weight <= MOST_WEIGHT or query != f"weight={weight:g}":
        raise ValueError(
            f"only a learner has a weight, which is a number from {LEAST_WEIGHT} to {MOST_WEIGHT} of at most six "
            f"digits, as in ?weight=8. role={role}, found={query[:80]!r}"
        )
    return weight
