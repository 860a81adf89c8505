"""The settings of a job: a frozen dataclass per TOML section.

Each is in the settings.py of the folder that reads it. Names follow torchtitan 0.2 where possible.
The docstring under a field is its documentation, which `--help` prints. Rules between keys are on
the field (`Requires`), in the section's `violations`, and here only between sections of several
folders. What needs the number of ranks or the model's sizes is checked by `layout.py`.
"""

from __future__ import annotations

import logging
import pathlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import CheckpointError, Violation
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.config.old_names import OLD_NAMES
from torchtitan.config.settings import (
    Layer,
    Loaded,
    LocalPath,
    PositiveInt,
    Range,
    Requires,
    Text,
    load,
    to_toml,
)
from torchtitan.data.settings import PREFERENCES, READS_FILES, TrainingConfig, ValidationConfig
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.mesh.settings import CommConfig, ParallelismConfig
from torchtitan.metrics.settings import MetricsConfig, ProfilingConfig
from torchtitan.models.settings import HF, ModelSection
from torchtitan.optim.settings import LRSchedulerConfig, OptimizerConfig, RouterConfig, SpikesConfig
from torchtitan.parallel.settings import (
    MULTIPLE,
    ActivationCheckpointConfig,
    CompileConfig,
    QuantizeConfig,
)

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.toml"
"""The resolved settings in a run's folder."""


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The job: where its settings come from and where its output goes."""

    config_file: Text | None = None
    """TOML file to read, or the name of one of train_configs, like the first word of the command
    line; without one every setting has its default. Command line only."""
    dump_folder: LocalPath = "./outputs"
    """Folder that receives everything the run writes: config, metrics, logs, checkpoints."""
    description: str = "default job"
    """Free text, shown in the log and sent to W&B as the run's name."""
    time_limit_seconds: Annotated[PositiveInt | None, Requires("checkpoint.enable", True)] = None
    """Save and end the job this many seconds after its start. Choose the scheduler's time limit
    less the duration of a step and a save. Not given: no limit."""
    print_config: bool = False
    """Log the resolved settings at start."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Reproducibility."""

    seed: Annotated[int, Range(ge=0, lt=2**63)] = 0
    """Seed of the initial weights, the order of the data and every random generator."""
    deterministic: bool = False
    """Refuse operators that are not reproducible bit for bit."""
    deterministic_warn_only: Annotated[bool, Requires("deterministic", True, is_notice=True)] = (
        False
    )
    """Warn of such operators instead. Backward of flash attention is then not reproducible."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a job."""

    job: JobConfig = field(default_factory=JobConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    model: ModelSection = field(default_factory=ModelSection)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    spikes: SpikesConfig = field(default_factory=SpikesConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(
        default_factory=ActivationCheckpointConfig
    )
    compile: CompileConfig = field(default_factory=CompileConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def sequence_lengths(self) -> dict[str, int]:
        """Tokens of a sample in training and validation, by the key that sets them."""
        validated = self.validation.seq_len if self.validation.enable else None
        lengths = {"training.seq_len": self.training.seq_len, "validation.seq_len": validated}
        return {key: seq_len for key, seq_len in lengths.items() if seq_len is not None}

    def violations(self) -> Iterator[Violation]:
        """Yield the broken rules between sections."""
        if self.training.num_epochs is None:  # else build.py checks it, once the data are read
            yield from self.schedule_violations()
        yield from self._size_violations()
        yield from self._float8_violations()
        yield from self._custom_code_violations()
        if self.validation.enable and self.validation.holdout_fraction is None:
            yield from self._validation_data_violations()

    def schedule_violations(self) -> Iterator[Violation]:
        """Yield the broken rules of a schedule over training.steps."""
        schedule, steps, peak = self.lr_scheduler, self.training.steps, self.optimizer.lr
        total, decays_to_zero = schedule.total_steps, schedule.min_lr_factor == 0
        decays = schedule.decay_ratio is None or schedule.decay_ratio > 0
        if total is not None and total < steps and decays and decays_to_zero:
            yield Violation(
                ("lr_scheduler.total_steps", "training.steps", "lr_scheduler.min_lr_factor"),
                f"must be at least training.steps ({steps}), got {total}: after that the learning "
                "rate is 0; raise it, or set min_lr_factor",
            )
        num_warmup = schedule.num_warmup_steps(total or steps)
        if num_warmup > steps >= (10 if self.training.num_epochs is None else 1):  # fewer: a try
            yield Violation(
                ("lr_scheduler.warmup_ratio", "lr_scheduler.warmup_steps", "training.steps"),
                f"the warmup has {num_warmup} steps and the run {steps}: the learning rate ends at "
                f"{peak * steps / num_warmup:.3g}, below optimizer.lr = {peak:g}; lower "
                "warmup_steps, or write warmup_ratio = 0.1",
                is_notice=True,
            )

    def _size_violations(self) -> Iterator[Violation]:
        """Check that the layout divides sequences and batches."""
        parallelism, training, validation = self.parallelism, self.training, self.validation
        if wrong := parallelism.microbatch_violation(training.local_batch_size):
            yield wrong
        for key, seq_len in self.sequence_lengths.items():
            if wrong := parallelism.sequence_violation(seq_len, key=key):
                yield wrong
        size = validation.local_batch_size
        microbatch = parallelism.pipeline_parallel_microbatch_size
        is_cut = validation.enable and parallelism.pipeline_parallel_degree > 1
        if is_cut and size is not None and size % microbatch:
            yield Violation(
                (
                    "validation.local_batch_size",
                    "parallelism.pipeline_parallel_degree",
                    "parallelism.pipeline_parallel_microbatch_size",
                ),
                f"must be a multiple of a pipeline's microbatch of {microbatch} samples, got "
                f"{size}; try {max(size // microbatch, 1) * microbatch}",
            )

    def _float8_violations(self) -> Iterator[Violation]:
        """Check the number of tokens per product, over which the gradient of a weight sums."""
        seq_len, cp = self.training.seq_len, self.parallelism.context_parallel_degree
        num_samples = self.training.local_batch_size
        if self.parallelism.pipeline_parallel_degree > 1:
            num_samples = self.parallelism.pipeline_parallel_microbatch_size
        num_tokens = num_samples * seq_len // cp
        multiplies = self.model.converters and not self.quantize.linear.float8.emulate
        if multiplies and num_tokens % MULTIPLE:
            rule = f"needs a multiple of {MULTIPLE} tokens per product, got {num_tokens}"
            yield Violation(("model.converters", "training.seq_len"), rule)

    def _custom_code_violations(self) -> Iterator[Violation]:
        """Check what a custom loss cannot be combined with."""
        training, parallelism = self.training, self.parallelism
        is_split = parallelism.tensor_parallel_degree > 1 and not parallelism.disable_loss_parallel
        if is_import_path(training.loss) and is_split:
            yield Violation(
                (
                    "training.loss",
                    "parallelism.disable_loss_parallel",
                    "parallelism.tensor_parallel_degree",
                ),
                "needs the logits of the full vocabulary, which tensor parallelism shards; "
                "write parallelism.disable_loss_parallel = true",
            )

    def _validation_data_violations(self) -> Iterator[Violation]:
        """Check that validation has data of its own."""
        validation, default = self.validation, self.training.dataset
        dataset, files = validation.dataset or default, validation.dataset_path
        keys = ("validation.dataset", "validation.dataset_path", "validation.enable")
        if (dataset in PREFERENCES) != (default in PREFERENCES):
            rule = f'must be of pairs as training.dataset "{default}", or neither, got "{dataset}"'
            yield Violation(("validation.dataset", "training.dataset"), rule)
        if dataset == default == "python_stdlib" or (dataset in READS_FILES and not files):
            yield Violation(
                (*keys, "training.dataset"),
                f'"{dataset}" needs other data than training; set validation.dataset_path, or '
                f"validation.holdout_fraction = 0.05 without dataset",
            )
        elif dataset not in READS_FILES and files:
            yield Violation(
                ("validation.dataset_path", "validation.dataset", "training.dataset"),
                f'needs dataset = "files" or "examples", got "{dataset}"; set that, or remove this',
            )


def load_job(argv: Sequence[str] | Layer) -> Loaded[Config]:
    """Read the file that the command line names, apply the other options, and check everything.

    Raises ConfigError that lists every mistake in the file and on the command line. Raises
    SystemExit after `--help` was printed.
    """
    if not isinstance(argv, dict) and {"-h", "--help"} & {*argv}:
        from torchtitan.config.help import format_help

        sys.stdout.write(f"{format_help(Config)}\n")
        raise SystemExit(0)
    return use_model_of_folder(load(Config, argv, old_names=OLD_NAMES))


def written_names(config: Config) -> list[str]:
    """Return the names that a run writes in its folder."""
    from torchtitan.checkpoint.lock import LOCK
    from torchtitan.checkpoint.settings import EXPORT
    from torchtitan.metrics.events import EVENTS
    from torchtitan.metrics.rows import RECORD

    local = config.checkpoint.local_folder
    drafts = (pathlib.Path(config.job.dump_folder) / local).glob(".*.tmp")
    return [
        *(f"{local}/{EXPORT}", *(f"{local}/{draft.name}" for draft in drafts)),
        *(CONFIG_FILE, f"{RECORD}.jsonl", f"{RECORD}.jsonl.tmp", EVENTS, "logs", "wandb"),
        *(local, config.metrics.save_tb_folder, LOCK),
        *(config.profiling.save_traces_folder, config.profiling.save_memory_snapshot_folder),
        config.comm.save_traces_folder,
    ]


def load_config(argv: Sequence[str]) -> Config:
    """Load a job and return only its settings."""
    return load_job(argv).config


def write_config(config: Config) -> None:
    """Write the resolved settings into the run's folder; raise CheckpointError if the file cannot
    be written."""
    path = pathlib.Path(config.job.dump_folder) / CONFIG_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_toml(config), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"job.dump_folder must be writable, got {path}: {error.strerror}"
        ) from error


def use_model_of_folder(loaded: Loaded[Config]) -> Loaded[Config]:
    """Use family, sizes and tokenizer of the Hugging Face folder that a job starts from.

    They hold where the job names none. `--model.flavor hf` overrides a file's family and tokenizer.
    The folder is read later, by `resume_rules.resolve_model`.
    """
    config, path = loaded.config, loaded.config.checkpoint.initial_load_path
    if path is None or not config.checkpoint.initial_load_in_hf:
        return loaded
    settings = {
        key: loaded.layer.get(("model", key)) for key in ("flavor", "name", "tokenizer_path")
    }
    chosen = {
        key: item for key, item in settings.items() if item is not None and item.value is not None
    }
    if "flavor" in chosen and not chosen["flavor"].is_in_file and config.model.flavor == HF:
        chosen = {key: item for key, item in chosen.items() if not item.is_in_file}
    model = config.model if "flavor" in chosen else replace(config.model, flavor=HF)
    if model.flavor == HF:
        name, tokenizer = model.name, model.tokenizer_path
        model = replace(
            model,
            name=name if "name" in chosen else HF,
            tokenizer_path=tokenizer if "tokenizer_path" in chosen else path,
        )
    return replace(loaded, config=replace(config, model=model))
