"""`skerry follow`: a run's versions as checkpoint folders, for inference engines and evaluations."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import click

from skerry import Follower, Tls
from skerry.checkpoints.base_model import BaseModel
from skerry.checkpoints.publisher import Publisher
from skerry.checkpoints.pulling import PullServer
from skerry.cli.connection import with_run
from skerry.cli.console import as_json, json_line, size_text
from skerry.cli.export import with_base, with_dtype
from skerry.follower import Version
from skerry.net.tls import Insecure
from skerry.net.tls_options import with_target
from skerry.runtime.addresses import server_address
from skerry.runtime.options import ADDRESS, INPUT_FOLDER, OUTPUT_FOLDER, Count
from skerry.wire.messages import untrained_from_messages


@click.command(
    epilog="""\b
Examples:
  skerry follow demo --out versions
  skerry follow gemma --out versions --like ./gemma-3-1b --dtype bfloat16 --every 100 --serve 127.0.0.1:8090
  curl 127.0.0.1:8090/pull_weights --json \\
    '{"local_checkpoint_dir": "/dev/shm/gemma", "source_dir": "versions", "target_version": 12}'
""",
)
@with_run
@click.option("--out", type=OUTPUT_FOLDER, required=True, help="The folder in which the versions are written.")
@click.option(
    "--every", type=Count(1), default=1, show_default=True, help="Versions of fragments from one to the next."
)
@click.option("--keep", type=Count(1), default=8, show_default=True, help="Versions to keep; each KEEP-th is full.")
@with_dtype
@click.option("--like", type=INPUT_FOLDER, help="A model's folder whose configuration and tokenizer are copied.")
@with_base
@click.option("--serve", type=ADDRESS, help="Answer POST /pull_weights at this address, as 127.0.0.1:8090.")
@as_json
@with_target
def follow(
    run: str,
    *,
    target: str,
    tls: Tls | Insecure | None,
    out: Path,
    every: int,
    keep: int,
    dtype: str,
    like: Path | None,
    base_paths: tuple[Path, ...],
    serve: str | None,
    is_json: bool,
) -> None:
    """Write a run's newest weights, and those after them, as Hugging Face checkpoint folders until it is closed.

    Each version becomes a folder weight_vNNNNNN, which appears at once, whole or as a delta of the one before,
    whichever is smaller. What the run makes while one is written is passed over. A reader's certificate is enough.

    With --serve, an inference engine without such a call of its own asks by POST /pull_weights for a version, which is
    put together in local_checkpoint_dir as an ordinary model folder. Whoever reaches the address can have that written:
    it should be one of this machine. It is served until the command is interrupted, also when the run is closed.
    """
    with ExitStack() as stack:
        if serve is not None:
            server = stack.enter_context(PullServer(server_address(serve)))
            serving = threading.Thread(target=server.serve_forever, daemon=True)
            serving.start()
            stack.callback(server.shutdown)
        base: BaseModel | None = None
        for version in stack.enter_context(Follower(target, run, every=every, tls=tls)):
            try:
                if base is None:
                    base = _base_model(version, base_paths)
                    publisher = Publisher(out, base=base, like=like, dtype=dtype, keep=keep)
                published = publisher.publish(version)
            except (OSError, ValueError) as error:
                raise click.BadParameter(f"can't be written: {error}. path={out}", param_hint="--out") from error
            if is_json:
                values = {**published._asdict(), "folder": str(published.folder), "position": version.position}
                click.echo(json_line(values))
                continue
            size, full = (published.sizes[key] for key in (published.encoding, "full"))
            text = f"{published.encoding}, {size_text(size)}, {size / full:.0%} of a full one"
            click.echo(f"{published.folder.name}: position {version.position}, {text}")
        for remark in base.remarks() if base is not None else ():
            click.echo(f"warning: {remark}", err=True)
        if serve is not None:
            serving.join()


def _base_model(version: Version, paths: tuple[Path, ...]) -> BaseModel:
    untrained = untrained_from_messages(version.run.untrained)
    base = BaseModel(untrained, version.arrays().keys(), paths)
    if base.missing:  # a model's loader would fill in what is missing at random
        raise click.UsageError(next(base.remarks()))
    return base
