"""What a learner trains with, as values. Imports no torch, so that `--help` is quick."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import click

from skerry.net.tls import Insecure, Tls
from skerry.net.tls_options import DEFAULT_TARGET
from skerry.runtime.options import ADDRESS, INPUT, INPUT_FILE, OUTPUT_FOLDER, Count, Number, Parsed
from skerry.wire.layout import check_name

# Of their working folders, unless --work-dir says otherwise.
LEARNERS: Final = Path("build", "learners")
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a GPT: `context` is the length of the longest sequence, and each head has an even width."""

    layer_count: int
    width: int
    head_count: int
    context: int
    vocabulary: int = 256  # distinct tokens: 256 for bytes, up to 65536 for 16-bit tokens


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


def _shard(text: str) -> tuple[int, int]:
    written = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
    if written is None or not 1 <= int(written[1]) <= int(written[2]):
        raise ValueError(f"a shard is i/n with i from 1 to n, such as 2/3. shard={text[:80]!r}")
    return int(written[1]), int(written[2])


def _device(text: str) -> str:
    if re.fullmatch(r"[a-z]{1,20}(:[0-9]{1,3})?", text) is None:
        raise ValueError(f"a device is auto, cpu, cuda, cuda:1 or mps. device={text[:80]!r}")
    return text


def _option(flag: str, kind: Any, default: Any, text: str) -> Any:
    """Returns the field of an option; one of the kind None is a switch."""
    words = {"is_flag": True} if kind is None else {"type": kind}
    return field(default=default, metadata={"flag": flag, "help": text, **words})


_STEPS: Final = Count(1, 10**12)
_COUNT: Final = Count(0, 10**12)
_SIZE: Final = Count(1, 2**20)
_INNER: Final = Count(1, 1_000_000)
_RATE: Final = Number(0, min_open=True)
_LEARNER, _REGION = (Parsed("name", partial(check_name, kind=kind)) for kind in ("learner", "region"))


@dataclass(frozen=True, kw_only=True)
class LearnSettings:
    """What a learner trains, on what, for how long and with whom: the options of `skerry learn`, in their order."""

    target: str = DEFAULT_TARGET
    tls: Tls | Insecure | None = None
    run: str = "demo"
    learner_id: str = _option(
        "--learner-id", _LEARNER, "", "Unique name in the run.  [default: host and random suffix]"
    )
    region: str = _option("--region", _REGION, "", "Where this learner is; for display only.")
    metrics: str | None = _option("--metrics", ADDRESS, None, "HOST:PORT for Prometheus to find metrics.")
    is_alone: bool = _option("--alone", None, False, "Train without a syncer, as a baseline to compare with.")
    may_create: bool = _option("--create/--no-create", None, True, "Create the run if it does not exist.")
    policy: Path | None = _option(  # noqa: RUF009 - a field
        "--policy", INPUT_FILE, None, "JSON file with the policy of a run that this learner creates."
    )
    inner_step_count: int | None = _option(
        "--inner-steps", _INNER, None, "Steps between deltas in a run that it creates.  [default: by --policy]"
    )
    size: str = _option("--model", click.Choice(list(MODEL_CONFIGS)), "tiny", "30 thousand to 1 billion parameters.")
    vocabulary: int | None = _option("--vocabulary", Count(2, 65536), None, "Distinct tokens.  [default: 256, bytes]")
    context: int | None = _option("--context", _SIZE, None, "Tokens in a sequence.  [default: the model's]")
    source: Path | None = _option(  # noqa: RUF009 - a field
        "--data", INPUT, None, "Text, *.bin, *.npy of uint16, or a folder.  [default: Python's standard library]"
    )
    shard: tuple[int, int] | None = _option(
        "--shard", Parsed("shard", _shard), None, "Train on part i of n, written i/n.  [default: all]"
    )
    batch_size: int = _option("--batch", _SIZE, 8, "Sequences in a step.")
    step_count: int = _option("--steps", _STEPS, 1000, "Training steps to take.")
    horizon_steps: int | None = _option(
        "--horizon", _STEPS, None, "Steps of the learning rate's schedule.  [default: --steps]"
    )
    stated_token_count: int | None = _option(
        "--planned-tokens",
        Count(0, 10**18),
        None,
        "Tokens that all learners of a run that it creates train; 0: no plan.  [default: its own times n of --shard]",
    )
    optimizer: str = _option("--optimizer", click.Choice(["adamw", "muon"]), "adamw", "Optimizer of training steps.")
    peak_rate: float = _option("--learning-rate", _RATE, 3e-3, "Peak learning rate.")
    warmup_steps: int = _option("--warmup", _COUNT, 50, "Steps until the peak learning rate.")
    weight_decay: float = _option("--weight-decay", Number(0), 0.1, "Weight decay of matrices.")
    seed: int = _option("--seed", Count(0), 0, "Seed of the initial weights and the data order.")
    evaluate_every: int = _option("--eval-every", _COUNT, 50, "Steps between evaluations; 0: none.")
    held_out_window_count: int = _option("--eval-windows", _SIZE, 64, "Held-out sequences to evaluate.")
    checkpoint_every: int = _option("--checkpoint-every", _COUNT, 200, "Steps between checkpoints; 0: at the end only.")
    log_every: int = _option("--log-every", _COUNT, 50, "Steps between log lines; 0: none.")
    work_directory: Path | None = _option(  # noqa: RUF009 - a field
        "--work-dir", OUTPUT_FOLDER, None, "For checkpoint and metrics.  [default: build/learners/LEARNER_ID]"
    )
    device: str = _option("--device", Parsed("device", _device), "auto", "auto (CUDA if there is), cpu, cuda:1, mps.")
    thread_count: int = _option("--threads", Count(1, 4096), 1, "CPU threads of PyTorch.")
    slowdown: float = _option("--slowdown", Number(1), 1.0, "Sleep after each step, to train slower by this factor.")
    flush_timeout_s: float = _option(
        "--flush-timeout", Number(0), 30.0, "Seconds to wait for the last deltas at the end."
    )

    @property
    def model(self) -> ModelConfig:
        """The shape of the model."""
        sizes = {name: value for name in ("vocabulary", "context") if (value := getattr(self, name)) is not None}
        return replace(MODEL_CONFIGS[self.size], **sizes)

    @property
    def horizon(self) -> int:
        """The steps of the learning rate's schedule."""
        return self.horizon_steps or self.step_count

    @property
    def planned_token_count(self) -> int:
        """The tokens that all learners of a run are to train, if each of n shards has a learner like this one.

        0 where that is not known: without a shard there may be any number of learners.
        """
        if self.stated_token_count is not None or self.shard is None:
            return self.stated_token_count or 0
        return self.horizon * self.batch_size * self.model.context * self.shard[1]

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint and the metrics."""
        return self.work_directory or LEARNERS / self.learner_id

    @property
    def checkpoint_path(self) -> Path:
        """The path of the local checkpoint."""
        return self.folder / "checkpoint.pt"

    @property
    def metrics_path(self) -> Path:
        """The path of the metrics file."""
        return self.folder / "metrics.jsonl"


def with_learn_options(command: F, only: Container[str] | None = None) -> F:
    """Gives a command every option of `LearnSettings` that has a flag, or only those of some fields."""
    for item in reversed(fields(LearnSettings)):
        if item.metadata and (only is None or item.name in only):
            words = {key: value for key, value in item.metadata.items() if key != "flag"}
            default = None if item.default == "" else item.default
            command = click.option(item.metadata["flag"], item.name, default=default, **words)(command)
    return command
