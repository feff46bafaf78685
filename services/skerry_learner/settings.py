"""The options of `skerry learn` as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from skerry.net.tls import Insecure, Tls
from skerry_learner.corpus import ShardSelection
from skerry_learner.model import MODEL_CONFIGS, ModelConfig


@dataclass(frozen=True)
class DataSettings:
    """Which tokens to train on. Without a `source` it is the source text of Python's standard library."""

    source: Path | None = None
    size_limit_bytes: int | None = None
    shard: ShardSelection = field(default_factory=ShardSelection)
    batch_size: int = 8
    held_out_window_count: int = 64


class InnerOptimizerName(StrEnum):
    """The inner optimizers by name."""

    ADAMW = "adamw"
    MUON = "muon"


@dataclass(frozen=True)
class OptimizerSettings:
    """The inner optimizer and its learning rate, whose schedule takes `horizon_steps`."""

    name: InnerOptimizerName = InnerOptimizerName.ADAMW
    peak_rate: float = 3e-3
    warmup_steps: int = 50
    horizon_steps: int = 1000
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_norm_limit: float = 1.0


@dataclass(frozen=True)
class LoopSettings:
    """How long to train, and how often to evaluate, save and log, in steps; 0 means never."""

    step_count: int = 1000
    evaluate_every: int = 50
    checkpoint_every: int = 200
    log_every: int = 50
    slowdown: float = 1.0
    """By which factor the emulated hardware is slower than this machine; at least 1."""
    flush_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Check the slowdown.

        Raises:
            ValueError: `slowdown` is below 1.
        """
        if self.slowdown < 1:
            raise ValueError(f"slowdown must be at least 1. slowdown={self.slowdown}")


@dataclass(frozen=True)
class MachineSettings:
    """Where to compute. `device` is `auto` or a name of torch."""

    device: str = "auto"
    thread_count: int = 1


@dataclass(frozen=True)
class RunSettings:
    """Which run to join. Without a `target` the learner trains without a syncer."""

    target: str | None = None
    run: str = "demo"
    region: str = ""
    may_create: bool = True
    policy_path: Path | None = None
    inner_step_count: int | None = None
    tls: Tls | Insecure | None = None


@dataclass(frozen=True)
class LearnSettings:
    """All options of `skerry learn`."""

    learner_id: str
    work_directory: Path
    seed: int = 0
    model: ModelConfig = MODEL_CONFIGS["tiny"]
    data: DataSettings = field(default_factory=DataSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    loop: LoopSettings = field(default_factory=LoopSettings)
    machine: MachineSettings = field(default_factory=MachineSettings)
    run: RunSettings = field(default_factory=RunSettings)

    @property
    def checkpoint_path(self) -> Path:
        """The path of the local checkpoint."""
        return self.work_directory / "checkpoint.pt"

    @property
    def metrics_path(self) -> Path:
        """The path of the metrics file."""
        return self.work_directory / "metrics.jsonl"
