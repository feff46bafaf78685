"""What a learner trains with, as values. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT: `context` is the length of the longest sequence, and each head has an even width."""

    layer_count: int
    width: int
    head_count: int
    context: int
    vocabulary: int = 256  # distinct tokens: 256 for bytes, up to 65536 for 16-bit tokens
    has_tied_embedding: bool = True


# About 30k, 0.47M, 4.8M, 25M, 85M, 303M and 1.0B parameters with a vocabulary of bytes.
MODEL_CONFIGS: Final[Mapping[str, ModelConfig]] = MappingProxyType(
    {
        "nano": ModelConfig(layer_count=2, width=32, head_count=2, context=64),
        "tiny": ModelConfig(layer_count=4, width=96, head_count=4, context=128),
        "mini": ModelConfig(layer_count=6, width=256, head_count=4, context=256),
        "small": ModelConfig(layer_count=8, width=512, head_count=8, context=512),
        "base": ModelConfig(layer_count=12, width=768, head_count=12, context=1024),
        "medium": ModelConfig(layer_count=24, width=1024, head_count=16, context=1024),
        "large": ModelConfig(layer_count=20, width=2048, head_count=16, context=2048),
    }
)


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
    """What a learner trains, on what and for how long. Of counts of steps, 0 means never."""

    learner_id: str
    work_directory: Path  # of the checkpoint and the metrics
    seed: int = 0
    model: ModelConfig = MODEL_CONFIGS["tiny"]
    source: Path | None = None  # of the tokens; None: the source text of Python's standard library
    size_limit_bytes: int | None = None
    shard: tuple[int, int] = (1, 1)
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

    @property
    def checkpoint_path(self) -> Path:
        """The path of the local checkpoint."""
        return self.work_directory / "checkpoint.pt"

    @property
    def metrics_path(self) -> Path:
        """The path of the metrics file."""
        return self.work_directory / "metrics.jsonl"
