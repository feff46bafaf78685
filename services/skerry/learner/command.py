"""`skerry learn`: train the reference model on one island."""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from skerry.client import Policy
    from skerry.learner.checkpoint import TrainingPosition
    from skerry.learner.settings import LearnSettings
    from skerry.learner.training import Training

# Named here again, because importing the model imports torch, which would make every `--help` wait for it. A test
# holds the two together.
MODEL_NAMES = ("nano", "tiny", "mini", "small", "base", "medium", "large")

_EPILOG = """\b
Examples:
  skerry learn --run demo --learner-id us-east --region us --shard 1/3
  skerry learn --alone --model tiny --steps 500 --work-dir build/alone
  skerry learn --target syncer.example:443 --run gemma --learner-id eu-1 \\
      --model base --vocabulary 50304 --data tokens/ --device cuda
"""


@click.command("learn", epilog=_EPILOG)
@click.option("--target", default="127.0.0.1:50051", show_default=True, help="The syncer, as host:port.")
@click.option("--run", "run_name", default="demo", show_default=True, help="The run to join.")
@click.option("--learner-id", default="learner-1", show_default=True, help="This island's name, unique in the run.")
@click.option("--region", default="", help="Where this island is, for people.")
@click.option("--alone", is_flag=True, help="Train without a syncer: a baseline to compare with.")
@click.option("--create/--no-create", default=True, show_default=True, help="Create the run if it doesn't exist.")
@click.option(
    "--policy",
    "policy_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A JSON file with the policy of the run, if this learner creates it.",
)
@click.option(
    "--inner-steps", type=click.IntRange(min=1), help="H, steps between two deltas of a fragment; as --policy."
)
@click.option("--model", type=click.Choice(MODEL_NAMES), default="tiny", show_default=True, help="Size of the model.")
@click.option("--vocabulary", type=click.IntRange(2, 65536), help="Distinct tokens.  [default: 256, bytes]")
@click.option("--context", type=click.IntRange(min=1), help="Tokens a sequence.  [default: by model]")
@click.option("--untied", is_flag=True, help="Give the output its own matrix instead of the embedding.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Text, token shards (*.bin, *.npy of uint16), or a directory.  [default: Python's standard library]",
)
@click.option("--data-limit-mb", type=click.FloatRange(min=0, min_open=True), help="Use only so much of the data.")
@click.option("--shard", default="1/1", show_default=True, help="Which of n disjoint parts of the data, as i/n.")
@click.option("--batch", type=click.IntRange(min=1), default=8, show_default=True, help="Sequences a step.")
@click.option("--steps", type=click.IntRange(min=1), default=1000, show_default=True, help="Inner steps to take.")
@click.option(
    "--horizon",
    type=click.IntRange(min=1),
    help="Steps of the learning rate's schedule, and planned for a run that it creates.  [default: --steps]",
)
@click.option(
    "--optimizer", type=click.Choice(["adamw", "muon"]), default="adamw", show_default=True, help="The inner optimizer."
)
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), default=3e-3, show_default=True)
@click.option("--warmup", type=click.IntRange(min=0), default=50, show_default=True, help="Steps of rising rate.")
@click.option("--weight-decay", type=click.FloatRange(min=0), default=0.1, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Decides weights and samples.")
@click.option("--eval-every", type=click.IntRange(min=0), default=50, show_default=True, help="In steps; 0: never.")
@click.option("--eval-windows", type=click.IntRange(min=1), default=64, show_default=True, help="Held-out sequences.")
@click.option("--checkpoint-every", type=click.IntRange(min=0), default=200, show_default=True, help="0: at the end.")
@click.option("--log-every", type=click.IntRange(min=0), default=50, show_default=True, help="In steps; 0: never.")
@click.option(
    "--work-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Checkpoint and metrics; resumed from if there.  [default: build/learners/LEARNER_ID]",
)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps.")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True, help="Processor threads of torch.")
@click.option(
    "--slowdown", type=click.FloatRange(min=1), default=1.0, show_default=True, help="Emulate slower hardware."
)
@click.option(
    "--flush-timeout", type=click.FloatRange(min=0), default=30.0, show_default=True, help="In s, at the end."
)
def learn(**options: Any) -> None:
    """Train a small GPT on one island, alone or together with others.

    The island never waits: training goes on while the network is slow, and while the syncer is away. On SIGTERM or
    SIGINT it finishes its step, sends what it has, writes its checkpoint and leaves; started again with the same
    --work-dir it goes on from there.
    """
    settings = _settings(options)
    position = _learn(settings)
    click.echo(f"{settings.learner_id}: {position.step} steps, {position.tokens} tokens. {settings.metrics_path}")


def _settings(options: dict[str, Any]) -> LearnSettings:
    from skerry.learner.corpus import ShardSelection
    from skerry.learner.model import MODEL_CONFIGS
    from skerry.learner.settings import (
        DataSettings,
        InnerOptimizerName,
        LearnSettings,
        LoopSettings,
        MachineSettings,
        OptimizerSettings,
        RunSettings,
    )

    try:
        shard = ShardSelection.parse(options["shard"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--shard") from error
    model = MODEL_CONFIGS[options["model"]]
    try:
        model = replace(
            model,
            vocabulary=options["vocabulary"] or model.vocabulary,
            context=options["context"] or model.context,
            has_tied_embedding=not options["untied"],
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    learner_id: str = options["learner_id"]
    limit_mb: float | None = options["data_limit_mb"]
    return LearnSettings(
        learner_id=learner_id,
        work_directory=options["work_dir"] or Path("build", "learners", learner_id),
        seed=options["seed"],
        model=model,
        data=DataSettings(
            source=options["data"],
            size_limit_bytes=None if limit_mb is None else int(limit_mb * 1e6),
            shard=shard,
            batch_size=options["batch"],
            held_out_window_count=options["eval_windows"],
        ),
        optimizer=OptimizerSettings(
            name=InnerOptimizerName(options["optimizer"]),
            peak_rate=options["learning_rate"],
            warmup_steps=options["warmup"],
            horizon_steps=options["horizon"] or options["steps"],
            weight_decay=options["weight_decay"],
        ),
        loop=LoopSettings(
            step_count=options["steps"],
            evaluate_every=options["eval_every"],
            checkpoint_every=options["checkpoint_every"],
            log_every=options["log_every"],
            slowdown=options["slowdown"],
            flush_timeout_s=options["flush_timeout"],
        ),
        machine=MachineSettings(device=options["device"], thread_count=options["threads"]),
        run=RunSettings(
            target=None if options["alone"] else options["target"],
            run=options["run_name"],
            region=options["region"],
            may_create=options["create"],
            policy_path=options["policy_path"],
            inner_step_count=options["inner_steps"],
        ),
    )


def _learn(settings: LearnSettings) -> TrainingPosition:
    import torch

    from skerry.learner.device import choose_device
    from skerry.learner.errors import LearnerInputError
    from skerry.learner.training import prepare, train
    from skerry.runtime.clock import SystemClock

    with _stop_on_signals() as stop:
        try:
            device = choose_device(settings.machine.device)
            torch.set_num_threads(settings.machine.thread_count)
            training = prepare(settings, device)
            gc.collect()
            gc.freeze()  # looking through modules and data again and again takes a quarter of a small model's time
            if settings.run.target is None:
                return train(training, None, clock=SystemClock(), stop=stop)
            return _train_attached(training, settings.run.target, stop)
        except LearnerInputError as error:
            raise click.ClickException(str(error)) from error


def _train_attached(training: Training, target: str, stop: threading.Event) -> TrainingPosition:
    from skerry.client import Learner
    from skerry.learner.training import train
    from skerry.runtime.clock import SystemClock

    settings = training.settings
    with Learner(
        training.model,
        target=target,
        run=settings.run.run,
        learner_id=settings.learner_id,
        region=settings.run.region,
        create=settings.run.may_create,
        policy=_policy(settings),
    ) as learner:
        return train(training, learner, clock=SystemClock(), stop=stop)


def _policy(settings: LearnSettings) -> Policy:
    from skerry.client import Policy

    run = settings.run
    try:
        values = {} if run.policy_path is None else json.loads(run.policy_path.read_text())
        values.setdefault("planned_step_count", settings.optimizer.horizon_steps)
        if run.inner_step_count is not None:
            values["inner_step_count"] = run.inner_step_count
        return Policy.from_json(values)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        message = f"cannot read the policy {run.policy_path}: {error}" if run.policy_path else str(error)
        raise click.ClickException(message) from error


@contextmanager
def _stop_on_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set, once; a second SIGINT interrupts as usual."""
    stop = threading.Event()
    previous_interrupt = signal.getsignal(signal.SIGINT)

    def on_signal(number: int, _frame: object) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, previous_interrupt)

    previous_terminate = signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous_terminate)
        signal.signal(signal.SIGINT, previous_interrupt)
