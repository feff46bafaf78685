"""Nothing in the product is there for tests alone."""

from __future__ import annotations

from tests.house.unused import exported_names, unused_constants, unused_definitions, unused_methods


def test_the_product_uses_every_class_and_function_that_it_has() -> None:
    found = list(unused_definitions())
    assert not found, f"used by tests only, or not at all: {found}"


def test_the_product_uses_every_method_that_it_has() -> None:
    found = list(unused_methods())
    assert not found, f"used by tests only, or not at all: {found}"


def test_the_product_uses_every_constant_that_it_has() -> None:
    found = list(unused_constants())
    assert not found, f"used by tests only, or not at all: {found}"


def test_what_users_import_counts_as_used() -> None:
    assert {"Learner", "ArrayLearner", "RunsClient", "FragmentLayout"} <= exported_names()
