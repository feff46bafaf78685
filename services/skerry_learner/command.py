"""`skerry learn`: train the reference model as one learner of a run."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from skerry.net.tls_options import with_target
from skerry.runtime.identifiers import new_learner_id
from skerry.runtime.options import run_argument
from skerry.wire.layout import check_name
from skerry_learner.settings import LearnSettings, with_learn_options

if TYPE_CHECKING:
    from skerry import Learner, Policy
    from skerry_learner.checkpoint import TrainingPosition
    from skerry_learner.training import Trainer

_EPILOG = """\b
Examples:
  skerry learn demo --learner-id us-east --region us --shard 1/2
  skerry learn demo --learner-id eu-west --region eu --shard 2/2
  skerry learn --alone --model tiny --steps 500
  skerry learn gpt --target syncer.example:443 --tls-ca ca.pem --tls-cert eu-1.pem --tls-key eu-1.key \\
      --learner-id eu-1 --model base --vocabulary 50304 --data tokens/ --device cuda
  # ca.pem, eu-1.pem and eu-1.key were made by `skerry keys`
"""


@click.command("learn", epilog=_EPILOG)
@with_target
@run_argument(partial(check_name, kind="run"), default=LearnSettings.run)
@with_learn_options
def learn(**options: Any) -> None:
    """Train a small GPT as one learner of a run.

    The learner does not wait for the network: training goes on while the network is slow or the syncer is down. On
    SIGTERM or SIGINT the learner finishes its step, writes a checkpoint, sends its last deltas and exits. Started again
    with the same --learner-id or --work-dir, it resumes from the checkpoint. The exit status is then 128 and the
    signal's number, as for any command that a signal ends, so that a scheduler knows that the training is not done.
    """
    settings = LearnSettings(**{name: value for name, value in options.items() if value is not None})
    policy = _policy(settings)
    _check(settings)
    learner_id = settings.learner_id or ("alone" if settings.is_alone else new_learner_id())
    settings = replace(settings, learner_id=learner_id)
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"can't be written to: {error}", param_hint="--work-dir") from error
    position, status = _learn(settings, policy)
    click.echo(f"{settings.learner_id}: {position.step} steps, {position.tokens} tokens. {settings.metrics_path}")
    raise click.exceptions.Exit(status)


def _check(settings: LearnSettings) -> None:
    """Checks, before torch, data and model are loaded, what needs more than one option.

    Raises:
        click.UsageError: something can't be right.
    """
    from skerry.net.handshakes import check_certificate
    from skerry.net.tls import check_target

    if settings.is_alone:
        if settings.metrics is not None:
            raise click.UsageError("--metrics shows the exchange with a syncer, and --alone has none")
        return
    try:
        for tls in check_target(settings.target, settings.tls):
            check_certificate(tls, settings.run, settings.learner_id or None)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _policy(settings: LearnSettings) -> Policy:
    """Returns the policy of a run that this learner creates."""
    from skerry.wire.policy import Policy

    path = settings.policy
    try:
        values = {} if path is None else json.loads(path.read_bytes())
        values.setdefault("planned_token_count", settings.planned_token_count)
        if settings.inner_step_count is not None:
            values["inner_step_count"] = settings.inner_step_count
        return Policy.from_json(values)
    except (ValueError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise click.BadParameter(f"can't be read. file={path}, because={error}", param_hint="--policy") from error


def _learn(settings: LearnSettings, policy: Policy) -> tuple[TrainingPosition, int]:
    """Returns where the training ended, and the exit status."""
    import torch

    from skerry.runtime.clock import SystemClock
    from skerry.runtime.logs import log_to_stderr
    from skerry_learner.errors import LearnerInputError
    from skerry_learner.training import Trainer

    log_to_stderr()
    with _stopping() as stop:
        try:
            torch.set_num_threads(settings.thread_count)
            trainer = Trainer(settings, clock=SystemClock())
            gc.collect()
            gc.freeze()  # scanning modules and data in every collection takes a quarter of a small model's step
            with ExitStack() as stack:
                learner = None if settings.is_alone else _attached(stack, trainer, policy)
                stop.is_training = True
                position = trainer.train(learner, stop=stop)
                if learner is not None and learner.failure is not None:
                    raise learner.failure
                is_done = position.step >= settings.step_count or (learner is not None and learner.is_closed)
            return position, 0 if is_done else stop.exit_status
        except LearnerInputError as error:
            raise click.ClickException(str(error)) from error


def _attached(stack: ExitStack, trainer: Trainer, policy: Policy) -> Learner:
    """Returns a learner that is attached to its run until the stack is left, as its metrics are served."""
    from skerry import Learner
    from skerry.runtime.exposition import exposed
    from skerry.runtime.otlp import exported, otlp_settings
    from skerry_learner.exposition import LearnerMetrics

    settings = trainer.settings
    learner = stack.enter_context(
        Learner(
            trainer.model,
            target=settings.target,
            run=settings.run,
            learner_id=settings.learner_id,
            region=settings.region,
            create=settings.may_create,
            policy=policy,
            tls=settings.tls,
        )
    )
    learner.count_from(trainer.position.step, trainer.position.tokens)
    metrics = LearnerMetrics(learner, run=settings.run, learner_id=settings.learner_id)
    stack.enter_context(exported(metrics, otlp_settings(os.environ), service="skerry-learner"))
    if settings.metrics is not None:
        try:
            click.echo(f"metrics at {stack.enter_context(exposed(metrics, settings.metrics))}")
        except OSError as error:
            raise click.BadParameter(f"can't be listened on: {error}", param_hint="--metrics") from error
    return learner


class _Stop(threading.Event):
    """Set when the learner is told to end: before it trains it does so at once, then between two steps."""

    is_training = False
    exit_status = 0

    def on_signal(self, number: int, _frame: object) -> None:
        self.set()
        self.exit_status = 128 + number
        if number == signal.SIGINT:  # a second one interrupts
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not self.is_training:
            click.echo("stopped before it trained", err=True)
            raise click.exceptions.Exit(self.exit_status)


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
