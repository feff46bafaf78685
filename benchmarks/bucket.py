"""What learners cost that serve a bucket to themselves, beside the same learners of one syncer.

Each learner trains random numbers at a fixed pace, in a process of its own. The bucket is moto's server with the delay
of a distant one before each answer; it counts what it is asked for. Every learner's process also watches the run, so
that the same news is timed at each replica: on one machine all have one clock.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import boto3
import numpy as np
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from moto.s3.responses import S3Response
from werkzeug.serving import make_server

from benchmarks.dialogue import Dialogue
from benchmarks.processes import Process, all_hear, children, this_python
from benchmarks.report import Row, measured, write_rows
from skerry import ArrayLearner, Policy, RunsClient
from skerry.errors import SkerryError
from skerry.v1.types_pb2 import Event
from tests.support.no_cloud import stay_here

H: Final = 24
FRAGMENTS: Final = 4
SIDE: Final = 512
NUMEL: Final = FRAGMENTS * SIDE**2
WARM_ROUNDS: Final = 1
BUCKET: Final = "skerry"
# Of Amazon's price list: a request of these kinds costs 12.5 times one that reads, and one that deletes nothing.
WRITES: Final = frozenset({"PUT", "POST", "LIST"})
READS: Final = frozenset({"GET", "HEAD"})


class CountedBucket:
    """A WSGI application that answers as moto does, late, and counts."""

    def __init__(self, latency_s: float) -> None:
        self._answer: Any = DomainDispatcherApplication(create_backend_app)
        self._latency_s = latency_s
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.answers_s: list[float] = []  # how long moto itself took

    def __call__(self, request: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """Answers one request."""
        time.sleep(self._latency_s)
        method, query = request["REQUEST_METHOD"], request.get("QUERY_STRING", "")
        kind = "LIST" if "list-type" in query else "DELETE" if method == "POST" and "delete" in query else method
        start_s = time.monotonic()
        body = b"".join(self._answer(request, start))
        with self._lock:
            self.answers_s.append(time.monotonic() - start_s)
            self.counts[kind] += 1
            self.counts["bytes in"] += int(request.get("CONTENT_LENGTH") or 0)
            self.counts["bytes out"] += len(body)
        return [body]


@contextlib.contextmanager
def counted_bucket(latency_s: float) -> Iterator[CountedBucket]:
    """Yields an empty bucket, to which the environment leads from now on."""
    lock, put_object, bucket = threading.Lock(), S3Response.put_object, CountedBucket(latency_s)

    def put_alone(response: S3Response) -> Any:
        """Moto looks whether an object exists and then writes it, so that of two conditional puts both may win."""
        with lock:
            return put_object(response)

    S3Response.put_object = put_alone  # type: ignore[assignment,method-assign]
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = make_server("127.0.0.1", 0, bucket, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stay_here()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    os.environ.update(AWS_REGION="us-east-1", AWS_ENDPOINT=endpoint, AWS_ENDPOINT_URL=endpoint)
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
        S3Response.put_object = put_object  # type: ignore[method-assign]


def learn(target: str, learner_id: str, step_s: float) -> None:
    """Trains as it is told, and tells what it heard of the run and when."""
    dialogue, numbers = Dialogue(), np.random.default_rng(0)
    arrays: dict[str, Any] = {
        f"layer{number}": (0.02 * numbers.standard_normal((SIDE, SIDE))).astype(np.float32)
        for number in range(FRAGMENTS)
    }
    noise = (1e-3 * numbers.standard_normal(2**20)).astype(np.float32)
    options: dict[str, Any] = {"policy": Policy(inner_step_count=H), "fragment_count": FRAGMENTS}
    options["connect_timeout_s"] = 120.0  # many processes start at once
    heard: list[tuple[str, str, int, float]] = []
    with (
        ArrayLearner(arrays, target=target, run="bench", learner_id=learner_id, create=True, **options) as learner,
        RunsClient(target, timeout_s=120.0) as client,
    ):

        def watch() -> None:
            with contextlib.suppress(SkerryError):  # the syncer ends first
                for event in client.watch("bench"):
                    if not isinstance(event, Event):
                        continue
                    if event.HasField("version_committed"):
                        made = event.version_committed.version
                        heard.append(("made", made.fragment, made.version, time.time()))
                    elif event.HasField("round_opened"):
                        opened = event.round_opened
                        heard.append(("opened", opened.fragment, opened.version, time.time()))

        threading.Thread(target=watch, daemon=True).start()
        dialogue.answer()
        for command in dialogue.commands():
            if not command["steps"]:
                break
            before, start_s = len(heard), time.monotonic()
            for number in range(command["steps"]):
                for array in arrays.values():
                    first = int(numbers.integers(len(noise) - array.size))
                    array[:] += noise[first : first + array.size].reshape(array.shape)
                learner.step(tokens=1000)
                time.sleep(max(0.0, start_s + (number + 1) * step_s - time.monotonic()))
            dialogue.answer(heard=heard[before:])
    dialogue.answer()


def news_s(answers: list[Any]) -> tuple[list[float], list[float]]:
    """Returns of each version the seconds from its round's first news to its own last, and from its own first to last.

    Both are of the news at all processes, and of versions that all of them heard of.
    """
    times: defaultdict[tuple[str, int], defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for answer in answers:
        for kind, fragment, version, time_s in answer["heard"]:
            times[fragment, version][kind].append(time_s)
    whole = [one for one in times.values() if len(one["made"]) == len(answers) and one["opened"]]
    made = [max(one["made"]) - min(one["opened"]) for one in whole]
    return made, [max(one["made"]) - min(one["made"]) for one in whole]


def rows_of(learner_count: int, *, is_own: bool, rounds: int, step_s: float, latency_s: float) -> Iterator[Row]:
    """Yields what learners of their own syncers, or of one that they share, took in some rounds."""
    case = f"{learner_count} learners, {'each its own syncer' if is_own else 'one syncer'}"
    with tempfile.TemporaryDirectory() as name, counted_bucket(latency_s) as bucket, contextlib.ExitStack() as stack:
        folder, target = Path(name), f"s3://{BUCKET}/{Path(name).name}"
        if not is_own:
            options = ["--listen", "127.0.0.1:0", "--store", target, "--log-level", "warning"]
            shared = Process(this_python("skerry.cli", "serve", *options), folder / "serve.log")
            stack.callback(shared.end)
            target = shared.read_line(60).split()[2].rstrip(b",").decode()
        arguments = [["--learn", target, f"learner-{number}", str(step_s)] for number in range(learner_count)]
        learners = stack.enter_context(children("benchmarks.bucket", arguments, folder))
        for learner in learners:
            learner.hear()
        all_hear(learners, steps=WARM_ROUNDS * H)
        bucket.answers_s.clear()
        before, start_s = Counter(bucket.counts), time.monotonic()
        answers = all_hear(learners, steps=rounds * H)
        counts, wall_s = bucket.counts - before, time.monotonic() - start_s
        all_hear(learners, steps=0)
    made, spread = news_s(answers)
    version_count = len({tuple(one[1:3]) for answer in answers for one in answer["heard"] if one[0] == "made"})
    yield measured(case, "an answer of the bucket, beside its delay", bucket.answers_s or [0.0], "s")
    yield measured(case, "versions of a fragment", [version_count], "", limit=rounds * FRAGMENTS)
    yield measured(case, "round opened to version everywhere", made, "s")
    yield measured(case, "version at first to last replica", spread, "s")
    for kinds, words in ((WRITES, "requests that write or list"), (READS, "requests that read")):
        count = sum(counts[kind] for kind in kinds)
        yield measured(case, f"{words}, a version", [count / version_count], "")
        yield measured(case, f"{words}, a second", [count / wall_s], "1/s")
    for way in ("in", "out"):
        size_bytes = counts[f"bytes {way}"] / version_count
        yield measured(case, f"bytes {way}, a version", [size_bytes / (NUMEL / FRAGMENTS)], "byte/parameter")


def main() -> None:
    """Measures, or is a learner of a measurement."""
    if sys.argv[1:2] == ["--learn"]:
        learn(sys.argv[2], sys.argv[3], float(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--latency-s", type=float, default=0.03)
    parser.add_argument("--learners", type=int, nargs="*", default=[2, 8])
    given = parser.parse_args()
    options = {"rounds": given.rounds, "step_s": given.step_s, "latency_s": given.latency_s}
    cases = [(count, is_own) for count in given.learners for is_own in (True, False)]
    write_rows("bucket", [row for count, is_own in cases for row in rows_of(count, is_own=is_own, **options)])


if __name__ == "__main__":
    main()
