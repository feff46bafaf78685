"""Tokens, as `skerry tokens` makes them."""

from __future__ import annotations

import asyncio

from click.testing import CliRunner

from skerry_syncer.store.maintenance.tokens import tokens


def skerry_tokens(*words: str, status: int = 0) -> str:
    """Returns what `skerry tokens` prints on standard output; on both, if it ends with another status than 0."""
    result = CliRunner().invoke(tokens, words)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


async def in_thread(*words: str) -> str:
    """Returns what `skerry tokens` prints, which runs a loop of its own."""
    return await asyncio.to_thread(skerry_tokens, *words)
