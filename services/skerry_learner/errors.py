"""Errors in a learner's input; the message says what to do next.

LearnerInputError
├── DataError           the data cannot be used: use other data, or a smaller batch or context
├── CheckpointError     the local checkpoint cannot be read or written: use another work directory
├── DeviceError         the device does not exist: use another
└── UnsentWorkError     the syncer did not take the last work: see what is wrong there, or wait longer
"""

from __future__ import annotations


class LearnerInputError(Exception):
    """The learner cannot do what its options ask for."""


class DataError(LearnerInputError):
    """The data is missing, unreadable, too small, or has tokens outside the vocabulary."""


class CheckpointError(LearnerInputError):
    """The local checkpoint is damaged, belongs to another model or optimizer, or cannot be written."""


class DeviceError(LearnerInputError):
    """The device does not exist."""


class UnsentWorkError(LearnerInputError):
    """The syncer has not acknowledged the last work within the time that was allowed."""
