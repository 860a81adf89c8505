"""The settings of a whole job: one frozen dataclass for each TOML section, each in its room.

Names and meanings follow torchtitan 0.2 wherever they are the same. The docstring under a field is
its documentation: `--help` prints it. Types are strict: 2.5 is not a batch size.
"""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.config.types import STRICT, Seed, Text
from torchtitan.data.settings import TrainingConfig, ValidationConfig
from torchtitan.lora.settings import LoRAConfig
from torchtitan.mesh.settings import CommConfig, ParallelismConfig
from torchtitan.metrics.settings import MetricsConfig, ProfilingConfig
from torchtitan.models.settings import ModelConfig
from torchtitan.optim.settings import LRSchedulerConfig, OptimizerConfig
from torchtitan.parallel.settings import (
    ActivationCheckpointConfig,
    CompileConfig,
    QuantizeConfig,
)


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
