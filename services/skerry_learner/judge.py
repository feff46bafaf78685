"""`skerry judge`: report the reference model's loss on held-out text, version after version of a run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from skerry.net.tls_options import with_target
from skerry.runtime.options import Count, Parsed, run_argument
from skerry.wire.layout import check_name
from skerry_learner.settings import MODEL_CONFIGS, LearnSettings, ModelConfig, with_learn_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.follower import Version
    from skerry.v1.types_pb2 import Run

# Which of a learner's options say on what the model is evaluated, and where.
_OPTIONS: Final = frozenset({"context", "source", "batch_size", "held_out_window_count", "device", "thread_count"})
_METRIC: Final = "held_out_loss"
_EPILOG = """\b
Examples:
  skerry judge demo
  skerry judge gpt --data tokens/ --device cuda --every 24
  skerry runs policy demo --set gate.judge=judge --set gate.metric=held_out_loss --set gate.margin=0.1
"""


@click.command("judge", epilog=_EPILOG)
@with_target
@run_argument(partial(check_name, kind="run"), default=LearnSettings.run)
@click.option(
    "--name",
    type=Parsed("name", partial(check_name, kind="judge")),
    default="judge",
    show_default=True,
    help="The judge's name; with a learner's certificate, the learner's id.",
)
@click.option(
    "--every", type=Count(1), default=1, show_default=True, help="Versions of fragments from one report to the next."
)
@partial(with_learn_options, only=_OPTIONS)
def judge(*, run: str, name: str, every: int, **options: Any) -> None:
    """Evaluate a run of the reference model on held-out text until the run is closed.

    Reports the newest version's loss to the run as held_out_loss, then that of the next ones. What the run makes
    during an evaluation is passed over. The run says which model it is. The data must be that of `skerry learn`: the
    held-out text is the same for all.
    """
    from skerry import Follower
    from skerry_learner.errors import LearnerInputError

    settings = LearnSettings(run=run, **{key: value for key, value in options.items() if value is not None})
    try:
        with Follower(settings.target, run, every=every, judge=name, tls=settings.tls) as follower:
            loss_of: Callable[[Version], float] | None = None
            for version in follower:
                loss_of = loss_of or _evaluation(settings, version.run)
                report = version.report(**{_METRIC: loss_of(version)})
                remark = f", worse than at {report.better_position} by the gate" if report.better_position else ""
                remark = ", rolled back meanwhile" if report.is_abandoned else remark
                click.echo(f"position {version.position}: {_METRIC} {report.metrics[_METRIC]:.4f}{remark}")
    except LearnerInputError as error:
        raise click.ClickException(str(error)) from error


def _evaluation(settings: LearnSettings, run: Run) -> Callable[[Version], float]:
    """Returns what evaluates a version.

    Raises:
        LearnerInputError: the run is none of the reference model, the data can't be read, or there is no such device.
    """
    import torch

    from skerry_learner.inner_training import evaluate
    from skerry_learner.model import Gpt
    from skerry_learner.training import load_data

    torch.set_num_threads(settings.thread_count)
    config = _config(run, settings.context)
    _, batches, device = load_data(settings, config)
    model = Gpt(config).to(device)

    def loss_of(version: Version) -> float:
        model.load_state_dict(version.state_dict())
        return evaluate(model, batches)

    return loss_of


def _config(run: Run, context: int | None) -> ModelConfig:
    """Returns the shape of the run's model."""
    import torch

    from skerry_learner.errors import LearnerInputError
    from skerry_learner.model import Gpt

    shapes = {tensor.name: tuple(tensor.shape) for tensor in run.tensors}
    vocabulary = shapes.get("embedding.weight", (1,))[0]
    for size in MODEL_CONFIGS.values():
        config = replace(size, context=context or size.context, vocabulary=vocabulary)
        with torch.device("meta"):
            wanted = {name: tuple(values.shape) for name, values in Gpt(config).state_dict().items()}
        if wanted == shapes:
            return config
    raise LearnerInputError(f"the run is not one of the reference model, as `skerry learn` trains it. run={run.name}")
