"""What a reader makes of an input, by a name; and small inputs that lead to different ones, for the corpus."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Final

from skerry.errors import SkerryError
from skerry.wire import WireError
from skerry_syncer.errors import SyncerError
from skerry_syncer.store.errors import StoreError
from tests.fuzz.decoders import Decoder

CORPUS: Final = Path(__file__).parent / "corpus"
ACCEPTED: Final = "accepted"
# Files of the corpus that `made` wrote; the others were found.
MADE: Final = "made-"
_REASONED: Final = (StoreError, SyncerError, WireError, SkerryError)
_DRAWS: Final = 4000
_MOST: Final = 5
_WORDS: Final = 5


def _kind(error: Exception) -> str:
    """Returns the error's reason if it has one of this project's, and else its class."""
    reason = getattr(error, "reason", "")
    return (reason if isinstance(error, _REASONED) else type(error).__name__).lower().replace("_", "-")


def outcome(decoder: Decoder, data: bytes) -> str:
    """Returns `accepted`, or the kind of the documented error and, after a dot, its first words."""
    try:
        found = decoder.decode(data)
    except decoder.errors as error:
        return _described(error)
    if isinstance(found, Exception):  # it reads errors, whose reasons and words are the input's
        return f"{ACCEPTED}-{type(found).__name__.lower()}"
    return f"{ACCEPTED}-nothing" if found == [] and not decoder.errors else ACCEPTED


def _described(error: Exception) -> str:
    words = re.findall("[a-z]+", str(error).partition(". ")[0].lower())[:_WORDS]
    return f"{_kind(error)}.{'-'.join(words)}"


def made(decoder: Decoder) -> dict[str, bytes]:
    """Returns a few inputs by their outcomes: accepted, one for each documented error, and other frequent ones.

    Each is the smallest of all inputs that came to its outcome; of those accepted there is one of usual size too.
    """
    source, smallest, count = Random(decoder.name), dict[str, bytes](), Counter[str]()
    accepted = list[bytes]()
    for _ in range(_DRAWS):
        data = decoder.make(source)
        name = outcome(decoder, data)
        count[name] += 1
        accepted += [data] if name.startswith(ACCEPTED) else []
        if name not in smallest or len(data) < len(smallest[name]):
            smallest[name] = data
    by_count = [name for name, _ in count.most_common()]
    kinds = {name.partition(".")[0]: name for name in reversed(by_count)}  # of each kind the most frequent one
    chosen = dict.fromkeys([*sorted(kinds.values()), *by_count])
    usual = sorted(accepted, key=len)[len(accepted) // 2]
    return {f"{ACCEPTED}.usual": usual} | {name: smallest[name] for name in list(chosen)[:_MOST]}
