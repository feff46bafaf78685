"""Deltas that all ranks of an island encode and push, each its own parts: no rank has the whole of one.

Parts are cut as if one rank encoded everything, and each rank gets some that follow one another: the ranks exchange
what they hold of the weights and of their base, so that each has the range of its parts. The bytes are those that one
rank would send. A rank pushes over connections of its own, and reports to the leader what it sends and how that ended;
the leader completes the push when all have ended. What a rank could not push, the leader fetches and sends itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from skerry.exchange.push import Delta, Part, encode_parts, push
from skerry.exchange.session import Calls
from skerry.ranks.calls import CountBytes, RankCalls
from skerry.ranks.ranges import even_bounds, part_bounds, range_boxes, to_ranges
from skerry.ranks.spread import Kept, Spread
from skerry.v1 import exchange_pb2, types_pb2
from skerry.wire import Encoding, FragmentLayout, NonFiniteError, TensorSpec
from skerry.wire.frames import encode_frames
from skerry.wire.messages import encoding_from_message, encoding_to_message


class IslandDeltas:
    """One rank's part in the deltas of its island."""

    def __init__(self, calls: RankCalls, specs: dict[str, TensorSpec]) -> None:
        """Every rank of the island makes one, at the same time."""
        self.shelf = calls.shelf
        self.calls = calls
        self._specs = specs
        self.shelf.tasks |= {"encode": self._encode, "push": self._push, "frames": self._frames}

    # At the leader.

    def encode(
        self,
        weights: Spread,  # becomes what receivers decode
        layout: FragmentLayout,
        encoding: Encoding,
        part_size_bytes: int,
        *,
        base: Spread,
    ) -> tuple[Part, ...]:
        """Returns the parts of base - weights, as `encode_parts` does; other ranks keep the frames of theirs.

        Raises:
            NonFiniteError: a value that can't be encoded.
        """
        kept = Kept(self.shelf)
        answers = self.shelf.do(
            "encode",
            weights=self.shelf.described(weights),
            base=self.shelf.described(base),
            frames=kept.key,
            tensors=[one.name for one in layout.tensors],
            encoding=encoding_to_message(encoding).SerializeToString().hex(),
            part_size_bytes=part_size_bytes,
        )
        for answer in answers:
            if "non_finite" in answer:
                raise NonFiniteError(**answer["non_finite"])
        weights.bounds = even_bounds(layout.numel, self.shelf.island.size)
        own: tuple[Part, ...] = self.shelf.things.pop(kept.key)
        parts = [*own]
        for rank, answer in enumerate(answers[1:], 1):
            courier = _Courier(self.calls, kept, rank)
            parts += [
                Part(first, numel, bytes.fromhex(digest), (), courier) for first, numel, digest in answer["parts"]
            ]
        return tuple(parts)

    # At every rank.

    def _encode(
        self,
        *,
        weights: dict[str, Any],
        base: dict[str, Any],
        frames: int,
        tensors: list[str],
        encoding: str,
        part_size_bytes: int,
    ) -> dict[str, Any]:
        shelf, rank = self.shelf, self.shelf.island.rank
        layout = FragmentLayout("", tuple(self._specs[name] for name in tensors))
        codecs = encoding_from_message(types_pb2.Encoding.FromString(bytes.fromhex(encoding)))
        bounds = part_bounds(layout, codecs, part_size_bytes, shelf.island.size)
        values, under = (shelf.ranged(**one, bounds=bounds) for one in (weights, base))
        span = bounds[rank], bounds[rank + 1]
        parts: tuple[Part, ...] = ()
        failure: dict[str, Any] | None = None
        try:
            parts = encode_parts(
                encode_frames, values.numpy(), layout, codecs, part_size_bytes, base=under.numpy(), span=span
            )
        except NonFiniteError as error:
            failure = {"tensor": error.tensor, "element": error.element, "value": error.value}
        # Ranks with few parts would be short of memory if those with many kept what is decoded until it is merged.
        even = even_bounds(layout.numel, shelf.island.size)
        shelf.things[weights["key"]] = to_ranges(shelf.island, shelf.group, values, range_boxes(bounds), even)
        if failure:
            return {"non_finite": failure}
        shelf.things[frames] = parts
        return {"parts": [(part.first, part.numel, part.digest.hex()) for part in parts]}

    # At other ranks.

    def _push(self, *, key: int, header: str) -> None:
        """Begins to push what this rank has of a delta."""
        parsed = exchange_pb2.PushHeader.FromString(bytes.fromhex(header))
        delta = Delta(parsed, self.shelf.things[key], b"", taken_at_s=0.0)

        async def pushed(calls: Calls, count_bytes: CountBytes) -> None:
            position = parsed.seen_position
            await push(calls, delta, seen_position=position, stored=(), count_bytes=count_bytes, completes=False)

        self.calls.begin(key, pushed)

    def _frames(self, *, key: int, first: int) -> str:
        (part,) = [part for part in self.shelf.things[key] if part.first == first]
        return b"".join(part.frames).hex()


class _Courier:
    """A rank with parts of a delta, as the leader sees it."""

    def __init__(self, calls: RankCalls, kept: Kept, rank: int) -> None:
        self._calls = calls
        self._kept = kept
        self._rank = rank

    async def push(self, header: exchange_pb2.PushHeader, count_bytes: CountBytes) -> None:
        """Has the rank push its parts, and returns when they are durable."""
        await self._calls.do("push", self._rank, key=self._kept.key, header=header.SerializeToString().hex())
        await self._calls.follow(self._rank, self._kept.key, count_bytes)

    async def fetch(self, part: Part) -> Part:
        """Returns a part with its frames."""
        frames = await self._calls.do("frames", self._rank, key=self._kept.key, first=part.first)
        return replace(part, frames=(bytes.fromhex(frames),), courier=None)
