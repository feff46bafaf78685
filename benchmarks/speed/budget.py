"""Where the processors' time of a synchronisation goes, computed from the tables of codecs and of synchronisations.

A part is what one core takes for it by itself, in ns a parameter; the rest is what was measured less the parts: copies,
differences, norms, gRPC, protobuf, the store and the event loop. What all learners share is divided by their number. A
rest below 0 says that a part is no longer done, or done together with another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from benchmarks.report import Row

_LEARNERS: Final = 2
_UNIT: Final = "ns"


def rows(tables: Mapping[str, list[Row]]) -> Iterator[Row]:
    """The parts of a learner's and of the syncer's time with int4 both ways; none while a table is missing."""
    codec, synchronisation = tables.get("codec", []), tables.get("synchronisation", [])
    if not codec or not synchronisation:
        return
    encode = _ns(codec, "int4", "encode end to end / memcpy")
    decode = _ns(codec, "int4", "decompress, decode and accumulate / memcpy")
    accumulate = _ns(codec, "int4", "decode and accumulate / memcpy")  # it was checked and decompressed on arrival
    digest = _ns(codec, "int4", "tree digest of the values / memcpy")
    learner = {
        "encode the delta": encode,
        "decode and apply the update": decode,
        "digest of the new weights": digest,
    }
    syncer = {
        "check a delta when it arrives": _ns(codec, "int4", "check of a delta that arrives / memcpy"),
        "decode and accumulate it in the merge": accumulate,
        "encode the update, once for all learners": encode / _LEARNERS,
        "digest of the new weights, likewise": digest / _LEARNERS,
    }
    for who, metric, parts in (
        ("a learner, a parameter", "CPU of a learner, a parameter", learner),
        ("the syncer, a contributed parameter", "CPU of the syncer, a contributed parameter", syncer),
    ):
        whole = next(row.value for row in synchronisation if row.metric == metric)
        for name, part in parts.items():
            yield Row(who, f"{name} / all", part, _UNIT, whole, part / whole)
        rest = whole - sum(parts.values())
        yield Row(who, "the rest / all", rest, _UNIT, whole, rest / whole)


def _ns(rows: list[Row], codec: str, metric: str) -> float:
    """Returns the time of a parameter, from a speed in Gparam/s."""
    return 1 / next(row.value for row in rows if row.case.startswith(codec) and row.metric == metric)
