"""What the images hold, and as whom they run."""

from __future__ import annotations

import pytest

from tests.e2e.composition import Composition
from tests.e2e.machine import CommandError

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

_SYNCER, _LEARNER = "skerry-syncer", "skerry-learner:us"
_IMAGES = (_SYNCER, _LEARNER)


def in_image(composition: Composition, image: str, *words: str, options: tuple[str, ...] = ()) -> str:
    """Returns what a program of an image printed, without a network."""
    entry, *rest = words
    return composition.engine.docker("run", "--rm", "--network=none", *options, f"--entrypoint={entry}", image, *rest)


@pytest.mark.parametrize("image", _IMAGES)
def test_an_image_runs_as_one_user_who_is_not_root_and_owns_nothing_of_the_program(
    composition: Composition, image: str
) -> None:
    assert in_image(composition, image, "id", "-u").strip() == "10001"
    owned = in_image(composition, image, "find", "/opt", "/usr", "-writable", "!", "-type", "l")
    assert owned.strip() == ""


@pytest.mark.parametrize("image", _IMAGES)
def test_an_image_holds_no_installer_no_wheels_and_no_source_tree(composition: Composition, image: str) -> None:
    # As root, whose home the image's own user can't look into.
    look = "ls -d / /source /wheels ~/.cache /opt/skerry/bin/pip 2> /dev/null || true"
    left = in_image(composition, image, "sh", "-c", look, options=("--user=0",))
    assert left.split() == ["/"]


def test_the_syncer_needs_no_torch(composition: Composition) -> None:
    find = "import importlib.util as u; print([name for name in ('torch', 'sympy', 'pip') if u.find_spec(name)])"
    assert in_image(composition, _SYNCER, "/opt/skerry/bin/python3", "-c", find).strip() == "[]"
    assert "skerry serve" in in_image(composition, _SYNCER, "skerry", "serve", "--help")


@pytest.mark.parametrize("image", _IMAGES)
def test_a_container_that_can_write_nowhere_else_finds_the_kernels_compiled(
    composition: Composition, image: str
) -> None:
    count = """
from skerry.wire import kernels_numba
compiled = [it.stats for it in vars(kernels_numba).values() if hasattr(it, "stats")]
print(sum(sum(it.cache_hits.values()) for it in compiled), sum(sum(it.cache_misses.values()) for it in compiled))
"""
    start = ("/opt/skerry/start.sh", "python3", "-c", count)
    hits, misses = map(int, in_image(composition, image, *start, options=("--read-only", "--tmpfs=/tmp")).split())
    assert hits > 0
    assert misses == 0


def test_an_image_refuses_plaintext_on_every_address_until_it_is_asked_for_by_name(composition: Composition) -> None:
    with pytest.raises(CommandError, match="--insecure"):
        composition.engine.docker("run", "--rm", "--network=none", _SYNCER)
