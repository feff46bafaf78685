"""`skerry learn`: train the reference model as one learner of a run."""

from __future__ import annotations

import gc
import json
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from skerry.net.tls_options import with_tls
from skerry.runtime.addresses import check_free, server_address
from skerry.runtime.options import (
    ADDRESS,
    INPUT,
    INPUT_FILE,
    OUTPUT_FOLDER,
    TARGET,
    Count,
    Number,
    Parsed,
    run_argument,
)
from skerry.wire.layout import check_name
from skerry_learner.settings import MODEL_CONFIGS, LearnSettings, OptimizerSettings

if TYPE_CHECKING:
    from skerry import Learner, Policy
    from skerry_learner.checkpoint import TrainingPosition
    from skerry_learner.training import Trainer

_TARGET_HELP = "Address of the syncer, as host:port. Replicas are separated by commas: a:443,b:443."
_METRICS_HELP = "Address on which Prometheus finds metrics, for example 127.0.0.1:9464.  [default: none]"
_DATA_HELP = "Text file, token shard (*.bin, *.npy of uint16) or directory.  [default: Python's standard library]"
_INNER_STEPS_HELP = (
    "Steps between two deltas of a fragment, in a run that this learner creates.  [default: by --policy]"
)
_HORIZON_HELP = "Steps of the learning-rate schedule, planned for a run that this learner creates.  [default: --steps]"
_WORK_DIR_HELP = (
    "For checkpoint and metrics; training resumes from its checkpoint.  [default: build/learners/LEARNER_ID]"
)
_LEARNER_ID_HELP = (
    "Name of this learner, unique in the run.  [default: host name and a random suffix, kept in --work-dir]"
)
_FLUSH_HELP = "Seconds to wait at the end until the last deltas are acknowledged."

_LEARNERS = Path("build", "learners")

_EPILOG = """\b
Examples:
  skerry learn demo --learner-id us-east --region us --shard 1/2
  skerry learn demo --learner-id eu-west --region eu --shard 2/2
  skerry learn --alone --model tiny --steps 500
  skerry learn gpt --target syncer.example:443 --tls-ca ca.pem --tls-cert eu-1.pem --tls-key eu-1.key \\
      --learner-id eu-1 --model base --vocabulary 50304 --data tokens/ --device cuda
  # ca.pem, eu-1.pem and eu-1.key were made by `skerry keys`
"""


def _name(what: str) -> Parsed:
    return Parsed("name", partial(check_name, kind=what))


def _shard(text: str) -> tuple[int, int]:
    written = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if written is None or not 1 <= int(written[1]) <= int(written[2]):
        raise ValueError(f"a shard is i/n with i from 1 to n, such as 2/3. shard={text[:80]!r}")
    return int(written[1]), int(written[2])


def _device(text: str) -> str:
    if re.fullmatch(r"[a-z]{1,20}(:[0-9]{1,3})?", text) is None:
        raise ValueError(f"a device is auto, cpu, cuda, cuda:1 or mps. device={text[:80]!r}")
    return text


_POSITIVE = Count(1, 10**12)  # as many steps as a run can be planned to take
_COUNT = Count(0, 10**12)
_OPTIMIZERS = click.Choice(["adamw", "muon"])
_POSITIVE_NUMBER = Number(0, min_open=True)


@click.command("learn", epilog=_EPILOG)
@click.option("--target", type=TARGET, default="127.0.0.1:50051", help=_TARGET_HELP)
@with_tls
@run_argument(partial(check_name, kind="run"), default="demo")
@click.option("--learner-id", type=_name("learner"), help=_LEARNER_ID_HELP)
@click.option("--region", type=_name("region"), help="Where this learner is; for display only.")
@click.option("--metrics", type=ADDRESS, metavar="HOST:PORT", help=_METRICS_HELP)
@click.option("--alone", is_flag=True, help="Train without a syncer, as a baseline to compare with.")
@click.option("--create/--no-create", "may_create", default=True, help="Create the run if it does not exist.")
@click.option(
    "--policy", "policy_path", type=INPUT_FILE, help="JSON file with the policy of a run that this learner creates."
)
@click.option("--inner-steps", "inner_step_count", type=Count(1, 1_000_000), help=_INNER_STEPS_HELP)
@click.option(
    "--model", type=click.Choice(list(MODEL_CONFIGS)), default="tiny", help="Size: 30 thousand to 1 billion parameters."
)
@click.option("--vocabulary", type=Count(2, 65536), help="Number of distinct tokens.  [default: 256, for bytes]")
@click.option("--context", type=Count(1, 2**20), help="Tokens in a sequence.  [default: by --model]")
@click.option("--untied", is_flag=True, help="Use separate matrices for the embedding and the output.")
@click.option("--data", "source", type=INPUT, help=_DATA_HELP)
@click.option("--data-limit-mb", type=_POSITIVE_NUMBER, help="Use only this many megabytes of the data.")
@click.option(
    "--shard",
    type=Parsed("shard", _shard),
    default="1/1",
    help="Train on the i-th of n disjoint parts of the data, written i/n.",
)
@click.option("--batch", "batch_size", type=Count(1, 2**20), default=8, help="Sequences in a step.")
@click.option("--steps", "step_count", type=_POSITIVE, default=1000, help="Training steps to take.")
@click.option("--horizon", "horizon_steps", type=_POSITIVE, help=_HORIZON_HELP)
@click.option("--optimizer", "name", type=_OPTIMIZERS, default="adamw", help="Optimizer of the training steps.")
@click.option("--learning-rate", "peak_rate", type=_POSITIVE_NUMBER, default=3e-3, help="Peak learning rate.")
@click.option("--warmup", "warmup_steps", type=_COUNT, default=50, help="Steps until the peak learning rate.")
@click.option("--weight-decay", type=Number(0), default=0.1, help="Weight decay of matrices.")
@click.option("--seed", type=Count(0), default=0, help="Seed of the initial weights and the data order.")
@click.option("--eval-every", "evaluate_every", type=_COUNT, default=50, help="Steps between evaluations; 0: none.")
@click.option(
    "--eval-windows", "held_out_window_count", type=Count(1, 2**20), default=64, help="Held-out sequences to evaluate."
)
@click.option("--checkpoint-every", type=_COUNT, default=200, help="Steps between checkpoints; 0: only at the end.")
@click.option("--log-every", type=_COUNT, default=50, help="Steps between log lines; 0: none.")
@click.option("--work-dir", "work_directory", type=OUTPUT_FOLDER, help=_WORK_DIR_HELP)
@click.option(
    "--device", type=Parsed("device", _device), default="auto", help="auto (CUDA if there is a GPU), cpu, cuda:1, mps."
)
@click.option("--threads", "thread_count", type=Count(1, 4096), default=1, help="CPU threads of PyTorch.")
@click.option("--slowdown", type=Number(1), default=1.0, help="Sleep after each step, to train slower by this factor.")
@click.option("--flush-timeout", "flush_timeout_s", type=Number(0), default=30.0, help=_FLUSH_HELP)
def learn(**options: Any) -> None:
    """Train a small GPT as one learner of a run.

    The learner does not wait for the network: training goes on while the network is slow or the syncer is down. On
    SIGTERM or SIGINT the learner finishes its step, writes a checkpoint, sends its last deltas and exits. Started again
    with the same --work-dir, it resumes from the checkpoint.
    """
    policy = _policy(options)
    _check(options)
    try:
        settings = _settings(options)
        settings.work_directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"can't be written to: {error}", param_hint="--work-dir") from error
    position = _learn(settings, options, policy)
    click.echo(f"{settings.learner_id}: {position.step} steps, {position.tokens} tokens. {settings.metrics_path}")


def _check(options: dict[str, Any]) -> None:
    """Checks, before torch, data and model are loaded, what needs more than one option.

    Raises:
        click.UsageError: something can't be right.
    """
    from skerry.net.handshakes import check_certificate
    from skerry.net.tls import check_target

    metrics: str | None = options["metrics"]
    if options["alone"]:
        if metrics is not None:
            raise click.UsageError("--metrics shows the exchange with a syncer, and --alone has none")
        return
    try:
        for tls in check_target(options["target"], options["tls"]):
            check_certificate(tls, options["run"], options["learner_id"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    if metrics is not None:
        with _listening():
            check_free(server_address(metrics))


@contextmanager
def _listening() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise click.BadParameter(f"can't be listened on: {error}", param_hint="--metrics") from error


def _policy(options: dict[str, Any]) -> Policy:
    """Returns the policy of a run that this learner creates."""
    from skerry.wire.policy import Policy

    path: Path | None = options["policy_path"]
    try:
        values = {} if path is None else json.loads(path.read_bytes())
        values.setdefault("planned_step_count", options["horizon_steps"] or options["step_count"])
        if options["inner_step_count"] is not None:
            values["inner_step_count"] = options["inner_step_count"]
        return Policy.from_json(values)
    except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise click.BadParameter(f"can't be read. file={path}, because={error}", param_hint="--policy") from error


def _settings(options: dict[str, Any]) -> LearnSettings:
    def named(kind: type[Any]) -> dict[str, Any]:
        return {item.name: options[item.name] for item in fields(kind) if item.name in options}

    sizes = {name: options[name] for name in ("vocabulary", "context") if options[name]}
    limit_mb: float | None = options["data_limit_mb"]
    learner_id = _own_id(options)
    derived: dict[str, Any] = {
        "learner_id": learner_id,
        "work_directory": options["work_directory"] or _LEARNERS / learner_id,
        "model": replace(MODEL_CONFIGS[options["model"]], **sizes, has_tied_embedding=not options["untied"]),
        "size_limit_bytes": None if limit_mb is None else int(limit_mb * 1e6),
        "optimizer": replace(
            OptimizerSettings(**named(OptimizerSettings)),
            horizon_steps=options["horizon_steps"] or options["step_count"],
        ),
    }
    return LearnSettings(**(named(LearnSettings) | derived))


def _own_id(options: dict[str, Any]) -> str:
    """Returns the learner's id: that of the options, or one that no other process of the working folder has."""
    from skerry.runtime.own_id import own_id

    if options["learner_id"] or options["alone"]:
        return options["learner_id"] or "alone"
    folder = options["work_directory"] or _LEARNERS
    folder.mkdir(parents=True, exist_ok=True)
    name, lock = own_id(folder)
    if lock is not None:
        click.get_current_context().with_resource(lock)
    return name


def _learn(settings: LearnSettings, options: dict[str, Any], policy: Policy) -> TrainingPosition:
    import torch

    from skerry.runtime.clock import SystemClock
    from skerry.runtime.logs import log_to_stderr
    from skerry_learner.errors import LearnerInputError
    from skerry_learner.training import Trainer

    log_to_stderr()
    with _stopping() as stop:
        try:
            torch.set_num_threads(options["thread_count"])
            trainer = Trainer(settings, clock=SystemClock())
            gc.collect()
            gc.freeze()  # scanning modules and data in every collection takes a quarter of a small model's step
            with ExitStack() as stack:
                learner = None if options["alone"] else _attached(stack, trainer, options, policy)
                stop.is_training = True
                position = trainer.train(learner, stop=stop.event)
                if learner is not None and learner.failure is not None:
                    raise learner.failure
            return position
        except LearnerInputError as error:
            raise click.ClickException(str(error)) from error


def _attached(stack: ExitStack, trainer: Trainer, options: dict[str, Any], policy: Policy) -> Learner:
    """Returns a learner that is attached to its run until the stack is left, as its metrics are served."""
    from skerry import Learner
    from skerry.runtime.exposition import exposed
    from skerry_learner.exposition import LearnerMetrics

    run, learner_id = options["run"], trainer.settings.learner_id
    learner = stack.enter_context(
        Learner(
            trainer.model,
            target=options["target"],
            run=run,
            learner_id=learner_id,
            region=options["region"] or "",
            create=options["may_create"],
            policy=policy,
            tls=options["tls"],
        )
    )
    learner.count_from(trainer.position.step, trainer.position.tokens)
    if options["metrics"] is not None:
        with _listening():
            url = stack.enter_context(
                exposed(LearnerMetrics(learner, run=run, learner_id=learner_id), options["metrics"])
            )
        click.echo(f"metrics at {url}")
    return learner


class _Stop:
    """Whether the learner was told to end: before it trains it does so at once, then between two steps."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.is_training = False

    def on_signal(self, number: int, _frame: object) -> None:
        self.event.set()
        if number == signal.SIGINT:  # a second one interrupts
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.is_training:
            click.echo("stopped before it trained", err=True)
            raise click.exceptions.Exit(0)


@contextmanager
def _stopping() -> Iterator[_Stop]:
    """Yields what SIGTERM and SIGINT set."""
    stop = _Stop()
    earlier = {number: signal.signal(number, stop.on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
