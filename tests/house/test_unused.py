"""Nothing in the product is there for tests alone."""

from __future__ import annotations

from typing import Final

from tests.house.unused import exported_names, unused_constants, unused_definitions, unused_methods

# What was unused when these tests came; nothing is added to these lists.
_KNOWN_DEFINITIONS: Final = frozenset({"services/skerry/store/objects/interface.py:DictObjects"})
_KNOWN_METHODS: Final = frozenset(
    {"services/skerry/demo/judgement.py:Judge.corpus", "services/skerry/syncer/host.py:RunHost.is_draining"}
)

_KNOWN_CONSTANTS: Final = frozenset({"client/skerry/client/retry.py:NO_RETRY"})


def test_the_product_uses_every_class_and_function_that_it_has() -> None:
    new = [name for name in unused_definitions() if name not in _KNOWN_DEFINITIONS]
    assert not new, f"used by tests only, or not at all: {new}"


def test_the_product_uses_every_method_that_it_has() -> None:
    new = [name for name in unused_methods() if name not in _KNOWN_METHODS]
    assert not new, f"used by tests only, or not at all: {new}"


def test_the_product_uses_every_constant_that_it_has() -> None:
    new = [name for name in unused_constants() if name not in _KNOWN_CONSTANTS]
    assert not new, f"used by tests only, or not at all: {new}"


def test_what_users_import_counts_as_used() -> None:
    assert {"Learner", "ArrayLearner", "RunsClient", "FragmentLayout"} <= exported_names()
