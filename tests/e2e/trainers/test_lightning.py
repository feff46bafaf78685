"""Lightning's Trainer as a learner."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    LambdaCallback,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import FSDPStrategy
from torch.utils.data import DataLoader

from examples.lightning_trainer import Rotation
from skerry import OuterOptimizer, Policy, RunsClient
from skerry.integrations.lightning import SkerryCallback
from skerry.wire import Codec, Encoding
from tests.e2e.trainers.two_islands import assert_merged, train_two_islands

POLICY = Policy(inner_step_count=2, lease_term_s=1.0)


class _Spy(lightning.Callback):  # type: ignore[misc]  # untyped
    """Keeps the learner, and its counts after each batch."""

    def __init__(self, skerry: SkerryCallback) -> None:
        self.skerry = skerry
        self.learner: Any = None
        self.counts: list[tuple[int, int]] = []
        self.logged: dict[str, Any] = {}
        self.planned = -1

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self.skerry.learner is not None:
            self.learner = self.skerry.learner
            self.counts.append((self.learner.stats.step_count, self.learner.stats.token_count))
            self.planned = self.learner.planned_token_count
            self.logged |= trainer.logged_metrics


def _fit(module: Any, *callbacks: Any, path: Path | None = None, **options: Any) -> lightning.Trainer:
    """Trains for an epoch of 8 batches, from a checkpoint if given, and returns the trainer."""
    trainer = lightning.Trainer(
        callbacks=list(callbacks), accelerator="cpu", logger=False, enable_progress_bar=False, log_every_n_steps=1,
        enable_model_summary=False, **({"max_epochs": 1, "enable_checkpointing": False} | options),
    )  # fmt: skip
    data = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(module, DataLoader(cast("Any", data), batch_size=4, num_workers=2), ckpt_path=path, weights_only=False)
    return trainer


def _callback(target: str, **options: Any) -> SkerryCallback:
    shared: dict[str, Any] = {"run": "pl", "learner_id": "us", "create": True, "policy": POLICY, "tokens_per_step": 4}
    return SkerryCallback(target=target, **(shared | options))


def test_two_islands_one_is_killed_and_the_merged_checkpoint_loads(target: str, tmp_path: Path) -> None:
    out = train_two_islands("lightning_trainer", target, "lightning", tmp_path)
    loaded = Rotation.load_from_checkpoint(out)
    assert_merged(target, "lightning", dict(loaded.named_parameters()))


def test_accumulated_batches_are_one_step_of_the_run(target: str) -> None:
    skerry = _callback(target, tokens_per_step=lambda: 3)
    spy = _Spy(skerry)
    module = Rotation()
    _fit(module, skerry, spy, accumulate_grad_batches=2)
    assert spy.counts == [(batch // 2, batch // 2 * 3) for batch in range(1, 9)]
    assert spy.logged["skerry/is_exchanging"] == 1.0
    assert skerry.learner is None
    assert_merged(target, "pl", dict(module.named_parameters()))


@pytest.mark.parametrize("failure", [OSError("the data are gone"), KeyboardInterrupt()])
def test_an_exception_loses_no_step(target: str, failure: BaseException) -> None:
    def fail(*_: Any) -> None:
        if len(spy.counts) == 3:
            raise failure

    skerry = _callback(target, policy=Policy(inner_step_count=1000))
    spy = _Spy(skerry)
    with pytest.raises((OSError, SystemExit)):
        _fit(Rotation(), skerry, spy, LambdaCallback(on_train_batch_start=fail))
    assert skerry.learner is None
    assert (spy.learner.stats.step_count, spy.learner.stats.unsent_step_count) == (3, 0)
    assert spy.learner.stats.deltas_acknowledged > 0


@pytest.mark.parametrize("leaves_on_signal", [True, False])  # Lightning itself handles SIGTERM, with one process
def test_a_signal_ends_training_with_the_step_under_way_and_loses_nothing(
    target: str, *, leaves_on_signal: bool
) -> None:
    def end(trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    skerry = _callback(target, policy=Policy(inner_step_count=1000), leave_on_signal=leaves_on_signal)
    spy = _Spy(skerry)
    with pytest.raises(SystemExit) as ended:
        _fit(Rotation(), skerry, spy, LambdaCallback(on_train_batch_start=end))
    assert ended.value.code in {None, 128 + signal.SIGTERM}
    assert (spy.learner.stats.step_count, spy.learner.stats.unsent_step_count) == (4, 0)
    assert signal.getsignal(signal.SIGTERM) is before


class _Finetuned(lightning.LightningModule):  # type: ignore[misc]  # untyped
    """A backbone with norms that keep statistics, and a head; large enough to be judged."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = torch.nn.Sequential(torch.nn.Linear(8, 128, bias=False), torch.nn.BatchNorm1d(128))
        self.head = torch.nn.Linear(128, 8)

    def training_step(self, batch: torch.Tensor) -> Any:
        return (self.head(self.backbone(batch)) - batch).square().mean()

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("loss", self.training_step(batch))

    def val_dataloader(self) -> Any:
        return DataLoader(cast("Any", torch.randn(8, 8)), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([weight for weight in self.parameters() if weight.requires_grad], lr=0.01)


@pytest.mark.parametrize(
    ("averaging", "is_first"),
    [
        (WeightAveraging, True),
        (lambda: EMAWeightAveraging(decay=0.9), False),
        (lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, device=None), True),
        (lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, device=None), False),
    ],
)
def test_an_average_beside_the_learner_is_never_sent_and_ends_in_the_module(
    target: str, averaging: Any, *, is_first: bool
) -> None:
    def keep(_: Any, module: Any, *__: Any) -> None:
        if skerry.learner is not None:
            trained[:] = [module.head.weight.detach().clone()]

    trained: list[torch.Tensor] = []
    exact = Encoding(Codec.FLOAT32)
    policy = replace(
        POLICY, outer=OuterOptimizer(learning_rate=1.0, momentum=0.0), delta_encoding=exact, update_encoding=exact
    )
    skerry, average, module = _callback(target, policy=policy), averaging(), _Finetuned()
    spy = _Spy(skerry)
    _fit(
        module,
        *([skerry, average] if is_first else [average, skerry]),
        spy,
        LambdaCallback(on_train_batch_end=keep),
        max_epochs=4,
    )
    assert spy.learner.failure is None
    assert (spy.learner.stats.step_count, spy.learner.stats.unsent_step_count) == (32, 0)
    mean = average._average_model
    averaged = dict(getattr(mean, "module", mean).named_parameters())["head.weight"]
    assert torch.equal(module.head.weight, averaged)
    run = torch.from_numpy(spy.learner.merged_weights()["head.weight"])
    torch.testing.assert_close(run, trained[0])
    assert (run - averaged).abs().max() > 1e-3


def test_layers_that_are_unfrozen_during_training_take_part(target: str) -> None:
    skerry, module = _callback(target), _Finetuned()
    spy = _Spy(skerry)
    began = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    unfreezing = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=0.01)
    _fit(module, unfreezing, skerry, spy, max_epochs=4)
    assert spy.learner.failure is None
    assert spy.learner.stats.deltas_dropped == 0
    assert_merged(target, "pl", dict(module.named_parameters()))
    assert all(not torch.equal(weight, began[name]) for name, weight in module.named_parameters())


def test_a_resumed_trainer_attaches_after_its_checkpoint(target: str, tmp_path: Path) -> None:
    trainer = _fit(Rotation(), _callback(target))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    skerry = _callback(target)
    spy = _Spy(skerry)
    module = Rotation()
    resumed = _fit(module, skerry, spy, path=tmp_path / "last.ckpt", max_epochs=2)
    assert resumed.global_step == 16
    assert spy.counts == [(step, step * 4) for step in range(1, 9)]
    assert_merged(target, "pl", dict(module.named_parameters()))


class _Manual(Rotation):
    """Trains each of two layers by an optimizer of its own."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layers[place].parameters(), lr=0.01) for place in (0, 2)]

    def training_step(self, batch: torch.Tensor) -> None:  # type: ignore[override]  # nothing to be trained on by Lightning
        for optimizer in cast("Any", self.optimizers()):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()


@pytest.mark.parametrize("planned", [None, 4])
def test_steps_of_manual_optimization_are_those_of_the_last_optimizer_and_a_plan_is_asked_for(
    target: str, caplog: pytest.LogCaptureFixture, planned: int | None
) -> None:
    skerry = _callback(target, **({} if planned is None else {"planned_token_count": planned}))
    spy = _Spy(skerry)
    trainer = _fit(_Manual(), skerry, spy, max_epochs=None, max_steps=8)
    assert trainer.global_step == 8
    assert [count for count, _ in spy.counts] == [1, 2, 3, 4]
    assert spy.planned == (planned or 0)
    assert caplog.text.count("give planned_token_count") == (planned is None)


def test_fsdp1_is_refused_by_name(target: str) -> None:
    strategy = object.__new__(FSDPStrategy)  # it is made on GPUs only, and so is its trainer
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=2, optimizers=[None], callbacks=[])
    with pytest.raises(ValueError, match="strategy=FSDPStrategy"):
        _callback(target).on_train_start(trainer, Rotation())
    with RunsClient(target) as runs:
        assert runs.list_runs() == []
