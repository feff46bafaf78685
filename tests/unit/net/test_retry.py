"""Calls that fail are repeated: within bounds, later and later, and as late as the server asks."""

from __future__ import annotations

import random
from typing import Any

import pytest

from skerry import (
    SkerryError,
    TryAgainError,
)
from skerry.errors import error_of, is_transient
from skerry.net.retry import Retry, RetrySettings


class FailingCall:
    """Fails with these errors one after another, and then answers."""

    def __init__(self, *errors: SkerryError) -> None:
        self.errors = list(errors)
        self.count = 0

    async def __call__(self) -> str:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def not_now(retry_after_s: float = 0.0) -> SkerryError:
    return error_of("STORE_UNAVAILABLE", "not now", retry_after_s=retry_after_s)


def rule(attempt_count: int | None = 5, **hooks: Any) -> Retry:
    return Retry(RetrySettings(attempt_count=attempt_count), random.Random(0), is_transient, **hooks)


async def test_a_call_is_repeated_until_it_answers() -> None:
    call, heard = FailingCall(not_now(), not_now()), list[tuple[int, str]]()
    retry = rule(3, before_pause=lambda attempt, error: heard.append((attempt, str(error))))
    assert await retry.call(call) == "answer"
    assert heard == [(1, "not now"), (2, "not now")]


async def test_a_call_is_repeated_within_its_bound() -> None:
    call = FailingCall(*[not_now()] * 9)
    with pytest.raises(TryAgainError):
        await rule(4).call(call)
    assert call.count == 4


async def test_a_failure_after_progress_counts_as_the_first() -> None:
    call = FailingCall(*[not_now()] * 9)
    with pytest.raises(TryAgainError):
        await rule(4, has_progressed=lambda: call.count == 3).call(call)
    assert call.count == 6


async def test_no_attempt_begins_after_the_timeout() -> None:
    call = FailingCall(not_now(), not_now(retry_after_s=30.0), not_now())
    with pytest.raises(TryAgainError):
        await rule(None).call(call, timeout_s=20.0)
    assert call.count == 2


async def test_a_refusal_is_not_repeated() -> None:
    call = FailingCall(error_of("BAD_REQUEST", "never"))
    with pytest.raises(SkerryError, match="never"):
        await rule().call(call)
    assert call.count == 1


def test_pauses_grow_to_their_limit_and_the_server_wins() -> None:
    settings, jitter = RetrySettings(first_wait_s=1.0, longest_wait_s=8.0), random.Random(0)
    error = error_of("UNREACHABLE", "gone")
    for attempt, longest_s in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 8.0), (10_000, 8.0)):
        assert longest_s / 2 <= settings.wait_s(attempt, error, jitter) <= longest_s
    told = error_of("STORE_FULL", "full", retry_after_s=30.0)
    assert 30.0 <= settings.wait_s(1, told, jitter) <= 37.5
