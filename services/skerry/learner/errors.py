"""What can be wrong with a learner's input, in words that say what to do next.

LearnerInputError
├── DataError           the data can't be trained on: name other data, or a smaller context
├── CheckpointError     the local checkpoint can't be read or written: name another directory, or what made it
└── DeviceError         the device isn't there: name another
"""

from __future__ import annotations


class LearnerInputError(Exception):
    """Something that was asked for can't be done; the message says what to do instead."""


class DataError(LearnerInputError):
    """The data source is missing, unreadable, too small, or doesn't fit the model."""


class CheckpointError(LearnerInputError):
    """The local checkpoint is damaged, was made by a different model, or can't be written."""


class DeviceError(LearnerInputError):
    """The device that was named isn't present."""
