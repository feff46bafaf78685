"""The one error of a learner's input."""

from __future__ import annotations


class LearnerInputError(Exception):
    """The learner can't do what its options ask for, with its data, its checkpoint or its device; says what to do."""
