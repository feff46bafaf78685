"""Gives one decoder input after input in a process of its own, and reports what it must not do.

A finding is an exception that the decoder does not document, an input that takes over a second of processor time,
memory beyond the bound, or the end of the process. The process notes each input in shared memory before it decodes it,
so that the one that killed it, or that it hangs on, is known.
"""

from __future__ import annotations

import gc
import hashlib
import mmap
import multiprocessing
import os
import resource
import signal
import struct
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Final

from tests.fuzz.decoders import Decoder

# Beyond what the process has before the first input: for all that a decoder allocates, and the allocator's own waste.
MEMORY_BOUND_BYTES: Final = 256 * 2**20
LONGEST_S: Final = 1.0  # of processor time, for one input
_HANGS_AFTER_S: Final = 30.0
_NOTE: Final = struct.Struct("<QQ")
_MOST_NOTED: Final = 2**20
_MOST_FINDINGS: Final = 20


@dataclass(frozen=True)
class Finding:
    """An input that a decoder must not answer as it did."""

    what: str
    data: bytes

    @property
    def name(self) -> str:
        """A name for a file."""
        return hashlib.sha256(self.data).hexdigest()[:16]


@dataclass
class Result:
    """What came of a campaign against one decoder."""

    inputs: int = 0
    accepted: int = 0  # of these: decoded without an error
    findings: list[Finding] = field(default_factory=list)


def check(decoder: Decoder, data: bytes) -> tuple[bool, float, str]:
    """Returns whether an input was decoded, its processor time in s, and what is wrong; empty: nothing."""
    wrong, is_accepted = "", False
    began_s = time.thread_time()
    try:
        decoder.decode(data)
        is_accepted = True
    except decoder.errors:
        pass
    except Exception as error:  # noqa: BLE001 - what must not come
        places = [f"{Path(at.filename).name}:{at.lineno}" for at in traceback.extract_tb(error.__traceback__)]
        wrong = f"{type(error).__name__} at {' < '.join(places[:-4:-1])}"
    took_s = time.thread_time() - began_s
    if took_s > LONGEST_S and not wrong:
        wrong = f"took {took_s:.1f} s"
    return is_accepted, took_s, wrong


def hunt(decoder: Decoder, seed: str, seconds: float) -> Result:
    """Returns what a process of its own found out in that time."""
    decoder.make(Random(seed))  # what is made once is made for all processes, and is no input's
    noted = mmap.mmap(-1, _NOTE.size + _MOST_NOTED)
    receiving, sending = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_hunt, args=(decoder, seed, seconds, noted, sending))
    child.start()
    sending.close()
    count, since_s = -1, time.monotonic()
    while not receiving.poll(1.0):
        now, _ = _NOTE.unpack_from(noted)
        if now != count:
            count, since_s = now, time.monotonic()
        elif time.monotonic() - since_s > _HANGS_AFTER_S:
            os.kill(child.pid or 0, signal.SIGKILL)
    try:
        result: Result = receiving.recv()
    except EOFError:
        child.join()
        count, size = _NOTE.unpack_from(noted)
        data = noted[_NOTE.size : _NOTE.size + size]
        what = (
            f"process ended by {signal.Signals(-(child.exitcode or 0)).name}" if (child.exitcode or 0) < 0 else "exit"
        )
        return Result(inputs=count, findings=[Finding(what, data)])
    child.join()
    return result


def _hunt(decoder: Decoder, seed: str, seconds: float, noted: mmap.mmap, sending: Connection) -> None:
    result, seen = Result(), set[str]()
    source = Random(seed)
    gc.freeze()
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + MEMORY_BOUND_BYTES, resource.RLIM_INFINITY))
    for data in _until(seconds, decoder, source):
        _NOTE.pack_into(noted, 0, result.inputs, min(len(data), _MOST_NOTED))
        noted[_NOTE.size : _NOTE.size + min(len(data), _MOST_NOTED)] = data[:_MOST_NOTED]
        is_accepted, took_s, wrong = check(decoder, data)
        if took_s > LONGEST_S:  # on a machine that is busy, it may be the machine
            is_accepted, took_s, wrong = check(decoder, data)
        result.inputs += 1
        result.accepted += is_accepted
        if wrong and wrong not in seen and len(seen) < _MOST_FINDINGS:
            seen.add(wrong)
            result.findings.append(Finding(wrong, data))
    sending.send(result)


def _until(seconds: float, decoder: Decoder, source: Random) -> Iterator[bytes]:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        yield decoder.make(source)
