"""The identity of a client and its role, as its certificate states them.

    skerry://admin/NAME          administers runs, and reads
    skerry://learner/ID          attaches and pushes as the learner ID in any run, creates runs, and reads
    skerry://learner/RUN/ID      does so in the run RUN only
    skerry://reader/NAME         reads

Certificates hold the URI as a subject alternative name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from skerry.wire.layout import check_name

SCHEME: Final = "skerry://"


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

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Returns the identity that a URI names.

        Raises:
            ValueError: the URI names none.
        """
        role, _, path = uri.removeprefix(SCHEME).partition("/")
        if not uri.startswith(SCHEME) or role not in Role.__members__.values():
            raise ValueError(f"not the URI of a client of Skerry. uri={uri[:200]!r}")
        run, slash, name = path.rpartition("/") if role == Role.LEARNER else ("", "", path)
        return cls(Role(role), check_name(name, role), check_name(run, "run") if slash else "")

    def __str__(self) -> str:
        return f"{SCHEME}{self.role}/{self.run}{'/' if self.run else ''}{self.name}"
