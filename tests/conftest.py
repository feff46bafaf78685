"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# Hypothesis fails an example that takes over 200 ms, which says more about the machine's load than about the code.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
