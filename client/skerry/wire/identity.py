"""The identity of a client and its role, as its certificate states them.

    skerry://admin/NAME          administers runs, and reads
    skerry://learner/ID          attaches and pushes as the learner ID in any run, creates runs, and reads
    skerry://learner/RUN/ID      does so in the run RUN only
    skerry://reader/NAME         reads

Certificates hold the URI as a subject alternative name. Where identities are SPIFFE's, `spiffe://TRUST-DOMAIN/skerry/`
stands for `skerry://`: the authority whose certificates are trusted decides who may have which domain.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from skerry.wire.layout import check_name

_SCHEME: Final = "skerry://"
_PREFIX: Final = re.compile(rf"{_SCHEME}|spiffe://[^/]+/skerry/")


class Role(StrEnum):
    """What a client is allowed to do; `skerry_syncer.access.roles` says which calls that means."""

    ADMIN = "admin"
    LEARNER = "learner"
    READER = "reader"


def is_of_client(uri: str) -> bool:
    """Whether a certificate's URI is there to name a client of Skerry; others are somebody else's."""
    return _PREFIX.match(uri) is not None


@dataclass(frozen=True)
class Identity:
    """One client; `str()` is its URI, skerry://..., however its certificate has it."""

    role: Role
    name: str  # of a learner: its id
    run: str = ""  # the only run that a learner may use; empty: any

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Returns the identity that a URI names.

        Raises:
            ValueError: the URI names none.
        """
        role, _, path = _PREFIX.sub("", uri, count=1).partition("/")
        if not is_of_client(uri) or role not in Role.__members__.values():
            raise ValueError(f"not the URI of a client of Skerry. uri={uri[:200]!r}")
        run, slash, name = path.rpartition("/") if role == Role.LEARNER else ("", "", path)
        return cls(Role(role), check_name(name, role), check_name(run, "run") if slash else "")

    def __str__(self) -> str:
        return f"{_SCHEME}{self.role}/{self.run}{'/' if self.run else ''}{self.name}"
