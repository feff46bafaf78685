"""What can go wrong in the store, split by what the caller does next.

StoreError
|-- StoreUnavailableError    the store can't be reached, or its answer is unknown: retry later        STORE_UNAVAILABLE
|-- StoreFullError           no space: an operator must make room                                     STORE_FULL
|-- StoreURLError            the URL can't be used: correct it                                        BAD_REQUEST
|-- ObjectMissingError       no such object                                                           (caller decides)
|-- RunNotFoundError         no run of that name                                                      RUN_NOT_FOUND
|-- RunExistsError           the name is taken                                                        RUN_EXISTS
`-- LogCorruptError          the store lost or changed what was durable: stop, tell a person          STORE_ROLLED_BACK
"""

from __future__ import annotations

from typing import ClassVar


class StoreError(Exception):
    """Any failure of the store; `reason` is stable."""

    reason: ClassVar[str] = "INTERNAL"


class StoreUnavailableError(StoreError):
    """The store can't be reached or its answer is unknown; the same call may succeed later."""

    reason = "STORE_UNAVAILABLE"


class StoreFullError(StoreError):
    """The store has no space left."""

    reason = "STORE_FULL"


class StoreURLError(StoreError):
    """The store's URL can't be used."""

    reason = "BAD_REQUEST"


class ObjectMissingError(StoreError):
    """There is no object of that name."""

    reason = "VERSION_NOT_FOUND"


class RunNotFoundError(StoreError):
    """There is no run of that name."""

    reason = "RUN_NOT_FOUND"


class RunExistsError(StoreError):
    """The run's name is taken."""

    reason = "RUN_EXISTS"


class LogCorruptError(StoreError):
    """The log is shorter than it was, or an entry does not follow its predecessor."""

    reason = "STORE_ROLLED_BACK"
