"""The options of `skerry learn` as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from skerry.net.tls import Insecure, Tls
from skerry_learner.corpus import ShardSelection
from skerry_learner.model import MODEL_CONFIGS, ModelConfig


@dataclass(frozen=True)
class OptimizerSettings:
    """The inner optimizer and its learning rate, whose schedule takes `horizon_steps`."""

    name: str = "adamw"  # or "muon"
    peak_rate: float = 3e-3
    warmup_steps: int = 50
    horizon_steps: int = 1000
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    gradient_norm_limit: float = 1.0


@dataclass(frozen=True, kw_only=True)
class LearnSettings:
    """All options of `skerry learn`. Of those that are counted in steps, 0 means never."""

    learner_id: str
    work_directory: Path
    seed: int = 0
    model: ModelConfig = MODEL_CONFIGS["tiny"]
    source: Path | None = None  # of the tokens; None: the source text of Python's standard library
    size_limit_bytes: int | None = None
    shard: ShardSelection = field(default_factory=ShardSelection)
    batch_size: int = 8
    held_out_window_count: int = 64
    optimizer: OptimizerSettings = OptimizerSettings()
    step_count: int = 1000
    evaluate_every: int = 50
    checkpoint_every: int = 200
    log_every: int = 50
    slowdown: float = 1.0  # by which factor the emulated hardware is slower than this machine; at least 1
    flush_timeout_s: float = 30.0
    device: str = "auto"
    thread_count: int = 1
    target: str | None = None  # None: train without a syncer
    run: str = "demo"
    region: str = ""
    may_create: bool = True
    tls: Tls | Insecure | None = None

    @property
    def checkpoint_path(self) -> Path:
        """The path of the local checkpoint."""
        return self.work_directory / "checkpoint.pt"

    @property
    def metrics_path(self) -> Path:
        """The path of the metrics file."""
        return self.work_directory / "metrics.jsonl"
