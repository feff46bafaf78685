"""`skerry judge`: report the reference model's loss on held-out text, version after version of a run."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from skerry.net.tls_options import with_target
from skerry.runtime.options import Count, Parsed, run_argument
from skerry.wire.layout import check_name
from skerry_learner.settings import LearnSettings, with_learn_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.follower import Version

# Which of a learner's options say what is evaluated, on what, and where.
_OPTIONS: Final = frozenset(
    {
        *("size", "vocabulary", "context", "is_untied", "source", "data_limit_mb"),
        *("batch_size", "held_out_window_count", "device", "thread_count"),
    }
)
_METRIC: Final = "held_out_loss"
_EPILOG = """\b
Examples:
  skerry judge demo
  skerry judge gpt --model base --vocabulary 50304 --data tokens/ --device cuda --every 24
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
    during an evaluation is passed over. Model and data must be those of `skerry learn`: the held-out text is the same
    for all.
    """
    from skerry import Follower
    from skerry_learner.errors import LearnerInputError

    settings = LearnSettings(run=run, **{key: value for key, value in options.items() if value is not None})
    try:
        loss_of = _evaluation(settings)
        with Follower(settings.target, run, every=every, judge=name, tls=settings.tls) as follower:
            for version in follower:
                report = version.report(**{_METRIC: loss_of(version)})
                remark = f", worse than at {report.better_position} by the gate" if report.better_position else ""
                remark = ", rolled back meanwhile" if report.is_abandoned else remark
                click.echo(f"position {version.position}: {_METRIC} {report.metrics[_METRIC]:.4f}{remark}")
    except LearnerInputError as error:
        raise click.ClickException(str(error)) from error


def _evaluation(settings: LearnSettings) -> Callable[[Version], float]:
    """Returns what evaluates a version.

    Raises:
        LearnerInputError: the data can't be read, or there is no such device; or, later, the run has another model.
    """
    import torch

    from skerry_learner.batches import held_out_batches
    from skerry_learner.corpus import load_corpus
    from skerry_learner.errors import LearnerInputError
    from skerry_learner.inner_training import evaluate
    from skerry_learner.model import Gpt
    from skerry_learner.training import choose_device

    torch.set_num_threads(settings.thread_count)
    device, limit_mb = choose_device(settings.device), settings.data_limit_mb
    corpus = load_corpus(settings.source, size_limit_bytes=None if limit_mb is None else int(limit_mb * 1e6))
    batches = held_out_batches(
        corpus.held_out,
        settings.model,
        batch_size=settings.batch_size,
        window_count=settings.held_out_window_count,
    )
    batches = [batch.to(device) for batch in batches]
    model = Gpt(settings.model).to(device)

    def loss_of(version: Version) -> float:
        try:
            model.load_state_dict(version.state_dict())
        except RuntimeError as error:
            message = f"the run has other tensors than this model. run={settings.run}, model={settings.size}"
            raise LearnerInputError(f"{message}. Pass the learners' --model, --vocabulary and --untied") from error
        return evaluate(model, batches)

    return loss_of
