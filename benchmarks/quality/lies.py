"""Learners that are broken or lie: they train, follow the run and keep to the protocol, so that all is well formed.

A broken one trains wrongly. A liar is an honest client behind a transport that changes the values of its deltas, what
their headers claim, or what its reports say.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.quality.bulk_transport import BulkTransport
from benchmarks.quality.task import BATCH_SIZE, MODEL, InnerTraining
from skerry.errors import SkerryError
from skerry.exchange.push import cut_messages
from skerry.v1 import exchange_pb2 as v1
from skerry.v1 import types_pb2
from skerry.wire.codecs import Codec, Compressor, Encoding, cut_frames
from skerry.wire.digests import delta_digest, part_digest
from skerry.wire.frames import decode_frames, encode_frames, pack_frame
from skerry.wire.layout import FragmentLayout
from skerry_syncer.store.log.state import RunState
from tests.simulation.sim_transport import SimTransport

Values = NDArray[np.float32]  # (numel,)
Fault: TypeAlias = Callable[[InnerTraining], Callable[[int], None]]
"""Given a learner's training before its first step, returns what happens before each step, by its number."""
_MOST: Final = 2**32  # what a header may claim at most: steps, and tokens a step
_PLAIN: Final = Encoding(Codec.FLOAT32, 128, Codec.FLOAT32, Compressor.NONE)
_CHECKPOINT_STEP: Final = 8
_FAULT_STEP: Final = 28
_GHOST_PAUSE_S: Final = 3.0
_FLOOD_PAUSE_S: Final = 0.02


def _same(values: Values, earlier: Sequence[Values]) -> Values:  # noqa: ARG001 - the form of all lies
    return values


def _scaled(factor: float) -> Callable[[Values, Sequence[Values]], Values]:
    return lambda values, _: (values * np.float32(factor)).astype(np.float32)


def _grown(factor: float) -> Callable[[Values, Sequence[Values]], Values]:
    """Returns the lie that is larger by 5 % in each round of a fragment."""
    return lambda values, earlier: (values * np.float32(factor * 1.05 ** len(earlier))).astype(np.float32)


def _noise(values: Values, earlier: Sequence[Values]) -> Values:
    noise = np.random.default_rng(len(earlier)).standard_normal(len(values))
    equal: Values = (noise * np.linalg.norm(values) / np.linalg.norm(noise)).astype(np.float32)
    return equal


def _one_tensor(values: Values, earlier: Sequence[Values]) -> Values:  # noqa: ARG001 - the form of all lies
    """Puts the whole length into the last elements, which are a vector of a layer's normalisation."""
    found = np.zeros_like(values)
    found[-8:] = np.linalg.norm(values) / np.sqrt(8)
    return found


def _first_again(values: Values, earlier: Sequence[Values]) -> Values:
    return earlier[0] if earlier else values


@dataclass(frozen=True)
class Lie:
    """What a liar changes; `values` gets the delta and those of the fragment before it."""

    values: Callable[[Values, Sequence[Values]], Values] = _same
    step_count: int = 0  # claimed of each delta; 0: the truth
    tokens_a_step: int = 0  # claimed; 0: the truth
    step_time_s: float = 0.0  # reported; 0: the truth
    ghost_count: int = 0  # more learners, that attach again and again and send nothing
    is_flood: bool = False  # sends its delta again as soon as there is a new version
    fault: Fault | None = None  # of its training


def _with_a_rate_100_times_too_high(training: InnerTraining) -> Callable[[int], None]:
    training.scale_rate(100)
    return lambda _: None


def _with_flipped_weights(training: InnerTraining) -> Callable[[int], None]:
    def before(step: int) -> None:
        if step == _FAULT_STEP:
            with torch.no_grad():
                for one in training.model.parameters():
                    one.neg_()

    return before


def _with_old_weights(training: InnerTraining) -> Callable[[int], None]:
    checkpoint: dict[str, Tensor] = {}

    def before(step: int) -> None:
        if step == _CHECKPOINT_STEP:
            checkpoint.update((name, one.detach().clone()) for name, one in training.model.named_parameters())
        elif step == _FAULT_STEP:
            with torch.no_grad():
                for name, one in training.model.named_parameters():
                    one.copy_(checkpoint[name])

    return before


BROKEN: Final[Mapping[str, Lie]] = {
    "NaN": Lie(_scaled(float("nan"))),
    "infinity": Lie(_scaled(float("inf"))),
    "1000 times the tokens": Lie(tokens_a_step=1000 * BATCH_SIZE * MODEL.context),
    "a rate 100 times too high": Lie(fault=_with_a_rate_100_times_too_high),
    "weights of flipped sign": Lie(fault=_with_flipped_weights),
    "a checkpoint of long ago": Lie(fault=_with_old_weights),
    "the first delta again and again": Lie(_first_again),
}
"""What a learner does that is broken and means no harm."""

LIES: Final[Mapping[str, Lie]] = {
    "×1000": Lie(_scaled(1000)),
    "×29": Lie(_scaled(29)),
    "×−29": Lie(_scaled(-29)),
    "first delta ×1e12": Lie(lambda values, earlier: values * np.float32(1 if earlier else 1e12)),
    "sign flip": Lie(_scaled(-1)),
    "growing by 5 % a round": Lie(_grown(1)),
    "flipped, growing by 5 % a round": Lie(_grown(-1)),
    "noise of equal norm": Lie(_noise),
    "all in one tensor": Lie(_one_tensor),
    "zeros": Lie(_scaled(0)),
    "NaN": Lie(_scaled(float("nan"))),
    "its first delta again and again": Lie(_first_again),
    "claims 2^32 tokens a step": Lie(tokens_a_step=_MOST),
    "claims 2^32 tokens a step, flipped": Lie(_scaled(-1), tokens_a_step=_MOST),
    "claims 2^32 steps": Lie(step_count=_MOST),
    "claims 2^32 steps, ×1e9": Lie(_scaled(1e9), step_count=_MOST),
    "reports a step of 1 ns": Lie(step_time_s=1e-9),
    "reports a step of an hour": Lie(step_time_s=3600.0),
    "twelve ghosts": Lie(ghost_count=12),
    "a delta for every version": Lie(is_flood=True),
}


class LyingTransport(BulkTransport):
    """The calls of a liar."""

    def __init__(self, *args: Any, lie: Lie, state: Callable[[], RunState | None]) -> None:
        """Takes what the honest transport takes, and the run's state, which a liar could follow by Watch."""
        super().__init__(*args)
        self._lie, self._state = lie, state
        self._earlier: dict[str, list[Values]] = {}
        self._sent: dict[str, v1.PushHeader] = {}  # by fragment: the last header
        self._claimed: dict[str, int] = {}  # by fragment: the step count of a flood, which goes on from one to the next
        self._made: dict[str, list[v1.PushDeltaRequest]] = {}  # by delta: a repeated push has the same bytes

    async def attach(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncGenerator[v1.AttachResponse, None]:
        """Opens the attach stream, with other reports."""
        async for response in super().attach(self._reports(requests)):
            yield response

    async def _reports(self, requests: AsyncIterator[v1.AttachRequest]) -> AsyncIterator[v1.AttachRequest]:
        async for request in requests:
            if request.WhichOneof("kind") == "report" and self._lie.step_time_s:
                request.report.step_time.FromNanoseconds(round(self._lie.step_time_s * 1e9))
            yield request

    async def push_delta(self, requests: AsyncIterator[v1.PushDeltaRequest]) -> v1.PushDeltaResponse:
        """Sends another delta instead."""
        given = [request async for request in requests]
        header = given[0].header
        if header.base_version < 0:
            return await super().push_delta(_listed(given))
        if header.delta_id not in self._made:
            self._made[header.delta_id] = self._changed(given)
            self._sent[header.fragment] = self._made[header.delta_id][0].header
        return await super().push_delta(_listed(self._made[header.delta_id]))

    async def flood(self) -> None:
        """Sends its last delta of each fragment again as soon as there is a new version, as a whole round's work."""
        source = random.Random("flood")
        while True:
            await asyncio.sleep(_FLOOD_PAUSE_S)
            for name, sent in list(self._sent.items()):
                state = self._state()
                assert state is not None
                fragment = state.fragments[name]
                if fragment.version <= sent.base_version:
                    continue
                header = v1.PushHeader()
                header.CopyFrom(sent)
                header.delta_id = source.randbytes(16).hex()
                header.base_version, header.base_digest = fragment.version, bytes.fromhex(fragment.newest.digest)
                header.step_count = state.policy.inner_step_count
                self._count_on(header)
                self._sent[name] = header
                messages = push_messages(header, self._earlier[name][-1], fragment.layout, _PLAIN)
                with suppress(SkerryError):
                    await SimTransport.push_delta(self, _listed(messages))

    def _count_on(self, header: v1.PushHeader) -> None:
        header.last_step = max(header.last_step, self._claimed.get(header.fragment, 0) + header.step_count)
        self._claimed[header.fragment] = header.last_step

    def _changed(self, given: Sequence[v1.PushDeltaRequest]) -> list[v1.PushDeltaRequest]:
        header = v1.PushHeader()
        header.CopyFrom(given[0].header)
        state = self._state()
        assert state is not None  # the run is created before anybody trains
        layout = state.fragments[header.fragment].layout
        values = np.empty(layout.numel, np.float32)
        decode_frames(b"".join(one.data for one in given if one.WhichOneof("kind") == "data"), layout, values)
        earlier = self._earlier.setdefault(header.fragment, [])
        changed = self._lie.values(values, earlier)
        earlier.append(values)
        if self._lie.step_count:
            header.step_count = self._lie.step_count
            header.last_step = self._lie.step_count * (1 + len(earlier))
        if self._lie.is_flood:
            self._count_on(header)
        if self._lie.tokens_a_step:
            header.token_count = header.step_count * self._lie.tokens_a_step
        return push_messages(header, changed, layout, _encoding_of(changed, state))


def _encoding_of(values: Values, state: RunState) -> Encoding:
    return state.policy.delta_encoding if np.isfinite(values).all() else _PLAIN


def push_messages(
    header: v1.PushHeader, values: Values, layout: FragmentLayout, encoding: Encoding
) -> list[v1.PushDeltaRequest]:
    """Returns a whole push of `values` in one part; what is not finite goes as it is."""
    digest = part_digest()
    if np.isfinite(values).all():
        frames = list(encode_frames(values, layout, encoding, digest=digest))
    else:
        cuts = list(cut_frames(layout, encoding, 0, layout.numel))
        raw = [values[cut.first : cut.first + cut.numel].view(np.uint8) for cut in cuts]
        frames = [pack_frame(cut, one, encoding) for cut, one in zip(cuts, raw, strict=True)]
        digest.update(b"".join(one.tobytes() for one in raw))
    part = digest.digest()
    begin = v1.PartBegin(first=0, numel=layout.numel, size_bytes=sum(map(len, frames)))
    return [
        v1.PushDeltaRequest(header=header),
        v1.PushDeltaRequest(part=begin),
        *(v1.PushDeltaRequest(data=data) for data in cut_messages(frames)),
        v1.PushDeltaRequest(part_end=v1.PartEnd(digest=part)),
        v1.PushDeltaRequest(complete=v1.PushComplete(digest=delta_digest([(0, layout.numel, part)]))),
    ]


async def haunt(transport: BulkTransport, name: str, *, run: str, run_uid: str, source: random.Random) -> None:
    """Attaches as `name` with a new session, reports much work, leaves the stream and begins again, for ever."""
    while True:
        hello = v1.Hello(run=run, run_uid=run_uid, learner_id=name, session_id=source.randbytes(16).hex())
        with suppress(TimeoutError):
            async with asyncio.timeout(_GHOST_PAUSE_S), aclosing(transport.attach(_ghostly(hello))) as events:
                async for _ in events:
                    pass


async def _ghostly(hello: v1.Hello) -> AsyncIterator[v1.AttachRequest]:
    yield v1.AttachRequest(hello=hello)
    report = types_pb2.LearnerReport(step_count=10_000, token_count=10_000)
    report.step_time.FromNanoseconds(10**9)
    while True:
        await asyncio.sleep(1.0)
        yield v1.AttachRequest(report=report)


async def _listed(messages: Sequence[v1.PushDeltaRequest]) -> AsyncIterator[v1.PushDeltaRequest]:
    for message in messages:
        yield message
