"""The settings of a job: one frozen dataclass for each TOML section.

Names and meanings follow torchtitan 0.2 wherever they are the same; `compat.py` maps older names
and refuses by name what is not built. The docstring under a field is its documentation: `--help`
prints it. Types are strict (2.5 is no batch size), values are checked by pydantic, and rules that
tie several fields together stand in `rules.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.checkpoint import CheckpointConfig as CheckpointConfig
from torchtitan.config.float8 import Float8Config as Float8Config
from torchtitan.config.float8 import QuantizeConfig as QuantizeConfig
from torchtitan.config.lora import LoRAConfig as LoRAConfig
from torchtitan.config.parallelism import ParallelismConfig as ParallelismConfig
from torchtitan.config.rope import RopeScalingConfig as RopeScalingConfig
from torchtitan.config.training import DataLoaderConfig as DataLoaderConfig
from torchtitan.config.training import TrainingConfig as TrainingConfig
from torchtitan.config.types import (
    STRICT,
    AboveOne,
    Decay,
    FiniteNonNegative,
    FinitePositive,
    Fraction,
    Seed,
    Strings,
    Text,
)
from torchtitan.config.validation import ValidationConfig as ValidationConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class JobConfig:
    """The job as a whole: where its settings come from and where its output goes."""

    config_file: Text | None = None
    """TOML file to read; without one every setting has its default. Command line only."""
    dump_folder: Text = "./outputs"
    """Folder that receives everything the run writes: config, metrics, logs, checkpoints."""
    description: str = "default job"
    """Free text, shown in the log and sent to W&B as the run's name."""
    print_config: bool = False
    """Log the resolved settings at start."""
    save_config_file: Text | None = None
    """Also write the resolved settings to this path, relative to dump_folder."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProfilingConfig:
    """Traces of whole steps, to see where the time goes."""

    enable_profiling: bool = False
    """Write a trace of every rank now and then; it slows the recorded steps, and changes none."""
    save_traces_folder: Text = "profile_traces"
    """Folder of the traces, inside dump_folder: step-N/rank_R.json, for chrome://tracing."""
    profile_freq: PositiveInt = 10
    """Steps from one trace to the next."""
    profiler_active: PositiveInt = 1
    """Steps that a trace holds: the last ones of each profile_freq."""
    profiler_warmup: NonNegativeInt = 3
    """Steps before these with the profiler on already, so that its start-up is not recorded."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MetricsConfig:
    """What is reported, how often and to where."""

    log_freq: PositiveInt = 10
    """Report every this many steps; the first and the last step are always reported."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files to save_tb_folder."""
    save_tb_folder: Text = "tb"
    """Folder of the TensorBoard files, inside dump_folder."""
    enable_wandb: bool = False
    """Send figures to Weights & Biases; WANDB_MODE=offline keeps them in dump_folder/wandb."""
    save_for_all_ranks: bool = False
    """Every rank, not rank 0 alone, writes metrics, TensorBoard and W&B figures, in own files."""
    disable_color_printing: bool = False
    """No colours on the console; NO_COLOR and output that is no terminal do the same."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Which model, and the tokenizer that goes with it."""

    name: Text = "llama3"
    """Model family: a key of torchtitan.models.MODELS."""
    flavor: Text = "debugmodel"
    """Size within the family, e.g. debugmodel, small, 1B, 3B, 8B, 70B, 405B."""
    tokenizer_path: Text = "bpe_2048"
    """Built-in name (bpe_2048, byte), tiktoken file (Llama 3's tokenizer.model), or tokenizer.json
    or its folder."""
    converters: Strings = ()
    """What layers are converted to before they are trained: "float8", as [quantize.linear.float8]
    says; empty: nothing."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding and of the output head; the flavor's if not given."""
    rope_theta: AboveOne | None = None
    """Base of the rotary wavelengths; the flavor's if not given."""
    rope_scaling: RopeScalingConfig = Field(default_factory=RopeScalingConfig)
    """Stretch of the rotary wavelengths."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """The optimizer and its constants."""

    name: Literal["Adam", "AdamW", "SGD"] = "AdamW"
    """Update rule."""
    lr: FinitePositive = 8e-4
    """Peak learning rate; the schedule multiplies it."""
    beta1: Decay = 0.9
    """Decay of the first moment (Adam, AdamW)."""
    beta2: Decay = 0.95
    """Decay of the second moment (Adam, AdamW)."""
    eps: FinitePositive = 1e-8
    """Added to the denominator (Adam, AdamW)."""
    momentum: Decay = 0.0
    """Momentum (SGD)."""
    weight_decay: FiniteNonNegative = 0.1
    """Weight decay of every parameter that no_decay_params does not match."""
    no_decay_params: Strings = ("*norm*", "*.bias")
    """Parameter names (shell patterns) that are never decayed."""
    frozen_params: Strings = ()
    """Parameter names (shell patterns) that are not trained: no gradient, no optimizer state."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the update runs: one kernel for all (fused; SGD: foreach), one for each operation
    (foreach), or a plain loop."""


DEFAULT_WARMUP_STEPS = 200


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LRSchedulerConfig:
    """Warmup, stable, decay: the learning rate as a pure function of the step."""

    warmup_steps: NonNegativeInt | None = None
    """Steps over which the rate grows linearly from near 0 to optimizer.lr; 200 if warmup_ratio is
    not given either."""
    warmup_ratio: Fraction | None = None
    """The same as a part of total_steps, in place of warmup_steps."""
    total_steps: PositiveInt | None = None
    """Length of the schedule; training.steps if not given. Pin it to be free to change
    training.steps."""
    decay_ratio: Fraction | None = None
    """Part of total_steps spent in decay; if not given the decay starts right after the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    decay_end: Literal["after_last_step", "last_step"] = "after_last_step"
    """Where the decay reaches min_lr_factor. after_last_step: the step after total_steps would, so
    that every step trains; last_step: the last one does."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this multiple of optimizer.lr."""

    def __post_init__(self) -> None:
        """Settle the default, so that resolved settings say how long the warmup is."""
        if self.warmup_steps is None and self.warmup_ratio is None:
            object.__setattr__(self, "warmup_steps", DEFAULT_WARMUP_STEPS)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the length of the warmup of a schedule of `total_steps`."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * total_steps)
        assert self.warmup_steps is not None
        return self.warmup_steps


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActivationCheckpointConfig:
    """Which activations are recomputed in backward instead of kept."""

    mode: Literal["none", "full", "selective", "memory_budget"] = "selective"
    """none: keep all; full: recompute every block; selective: what selective_ac_option says;
    memory_budget: the compiler chooses what of a block to recompute (needs compile.enable)."""
    selective_ac_option: str = "2"
    """A number n in quotes: recompute every n-th block; op: recompute every block but for attention
    and every second matrix product, whose outputs are kept."""
    memory_budget: Fraction = 0.5
    """Of mode = memory_budget, the part that may be kept of what a compiled block keeps by itself:
    1 recomputes nothing, 0 keeps a block's input, and that of attention which is not compiled."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CompileConfig:
    """torch.compile of the model's blocks."""

    enable: bool = False
    """Compile the blocks: the first step takes minutes, later ones less time."""
    backend: Text = "inductor"
    """Compiler: inductor; to look for faults aot_eager or eager, which make no code."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CommConfig:
    """Process groups."""

    init_timeout_seconds: PositiveInt = 300
    """Longest wait for other ranks until the first step of this start is done."""
    train_timeout_seconds: PositiveInt = 100
    """Longest wait for other ranks after that."""
    trace_buf_size: NonNegativeInt = 20000
    """Collectives remembered by NCCL's flight recorder, written to save_traces_folder on a timeout;
    0: off."""
    save_traces_folder: Text = "comm_traces"
    """Folder of the flight recorder's files, inside dump_folder."""
    save_traces_file_prefix: str = "rank_"
    """Beginning of the flight recorder's file names."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DebugConfig:
    """Reproducibility."""

    seed: Seed = 0
    """Seed of the initial weights, the order of the data and every random generator."""
    deterministic: bool = False
    """Refuse operators that are not reproducible bit for bit."""
    deterministic_warn_only: bool = False
    """Warn of such operators instead."""
    log_sample_hashes: bool = False
    """Write step, number and hash of every sample drawn to samples/rank_N.jsonl."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """A whole job."""

    job: JobConfig = Field(default_factory=JobConfig)
    profiling: ProfilingConfig = Field(default_factory=ProfilingConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = Field(default_factory=LRSchedulerConfig)
    lora: LoRAConfig = Field(default_factory=LoRAConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    activation_checkpoint: ActivationCheckpointConfig = Field(
        default_factory=ActivationCheckpointConfig
    )
    compile: CompileConfig = Field(default_factory=CompileConfig)
    quantize: QuantizeConfig = Field(default_factory=QuantizeConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
