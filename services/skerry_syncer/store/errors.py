"""What can go wrong in the store, split by what the caller does next.

StoreError
|-- StoreUnavailableError    the store can't be reached: retry later                                  STORE_UNAVAILABLE
|   |-- StoreRefusedError    wrong credentials, rights or bucket: a person must correct them        STORE_UNAVAILABLE
|   `-- OutcomeUnknownError  a write may or may not take effect: repeat it with the same ids          STORE_UNAVAILABLE
|-- StoreFullError           no space: an operator must make room                                     STORE_FULL
|-- StoreURLError            the URL can't be used: correct it                                        BAD_REQUEST
|-- ObjectMissingError       no such object                                                           (caller decides)
|   `-- CollectedError       a collection took it since the reader chose it: choose anew              VERSION_NOT_FOUND
|-- ObjectExistsError        a create met an object, or seems to have: read it back                   (caller decides)
|-- DraftConflictError       the run uid is taken by another spec                                     ID_REUSED
|-- RunNotFoundError         no run of that name                                                      RUN_NOT_FOUND
|-- RunExistsError           the name is taken                                                        RUN_EXISTS
|-- UnreadableObjectError    a blob is lost or damaged: go around it, or roll back                   OBJECT_UNREADABLE
|-- NewerFormatError         a newer version wrote it: another replica can read it                   NEWER_FORMAT
`-- LogCorruptError          the store lost or changed what was durable: stop and tell a person       STORE_ROLLED_BACK
"""

from __future__ import annotations

from typing import ClassVar

from skerry.runtime.redaction import redacted


class StoreError(Exception):
    """Any failure of the store; `reason` is stable, and no URL in the message has a secret."""

    reason: ClassVar[str] = "INTERNAL"

    def __str__(self) -> str:
        """Returns the message."""
        return redacted(super().__str__())


class StoreUnavailableError(StoreError):
    """The store can't be reached or refuses; the same call may succeed later."""

    reason = "STORE_UNAVAILABLE"


class StoreRefusedError(StoreUnavailableError):
    """The store answers, and refuses this process; the same call succeeds once a person has corrected something."""


class OutcomeUnknownError(StoreUnavailableError):
    """The store stopped answering while a write was under way, which may or may not take effect, now or later."""


class StoreFullError(StoreError):
    """The store has no space left."""

    reason = "STORE_FULL"


class StoreURLError(StoreError):
    """The store's URL can't be used."""

    reason = "BAD_REQUEST"


class ObjectMissingError(StoreError):
    """There is no object of that name."""

    reason = "VERSION_NOT_FOUND"


class CollectedError(ObjectMissingError):
    """A collection took the object since its reader read the log, which says so by now: nothing is damaged."""


class ObjectExistsError(StoreError):
    """The store says that the name is taken. Only reading the object back tells who wrote it, and whether it exists."""


class DraftConflictError(StoreError):
    """A run of that uid was created with other tensors or another fragment plan."""

    reason = "ID_REUSED"


class RunNotFoundError(StoreError):
    """There is no run of that name."""

    reason = "RUN_NOT_FOUND"


class RunExistsError(StoreError):
    """The run's name is taken, by the run whose uid is `uid`."""

    reason = "RUN_EXISTS"

    def __init__(self, message: str, *, uid: str) -> None:
        super().__init__(message)
        self.metadata = {"run_uid": uid}


class UnreadableObjectError(StoreError):
    """A blob that the log names is lost or damaged, or a version made of such blobs; `name` says which.

    The log itself is sound, so callers go on, with other blobs if there are some that lead to the same content.
    """

    reason = "OBJECT_UNREADABLE"

    def __init__(self, name: str, cause: object) -> None:
        super().__init__(f"object can't be read. name={name}, cause={cause}")
        self.name = name
        self.metadata = {"object": name}


class NewerFormatError(StoreError):
    """An object is of a format that this version does not know; programs that do can go on with the run."""

    reason = "NEWER_FORMAT"


class LogCorruptError(StoreError):
    """The log is shorter than it was, or an entry does not follow its predecessor."""

    reason = "STORE_ROLLED_BACK"
