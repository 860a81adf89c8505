"""The settings of a job: one frozen dataclass for each TOML section.

Names and meanings follow torchtitan 0.2 wherever they are the same; `compat.py` maps older names
and refuses by name what is not built. The docstring under a field is its documentation: `--help`
prints it. Types are strict (2.5 is no batch size), values are checked by pydantic, and rules that
tie several fields together stand in `rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)


def _in_a_list(value: object) -> object:
    """Let one plain string stand for a list of one."""
    return (value,) if isinstance(value, str) else value


def _number_in_a_list(value: object) -> object:
    """Let one plain number stand for a list of one."""
    return (value,) if isinstance(value, (float, int)) else value


Text = Annotated[str, Field(min_length=1)]
Degree = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
FinitePositive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
FiniteNonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Strings = Annotated[tuple[Text, ...], Field(strict=False), BeforeValidator(_in_a_list)]
Weights = Annotated[
    tuple[FinitePositive, ...], Field(strict=False), BeforeValidator(_number_in_a_list)
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


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
    """Size within the family, e.g. debugmodel, 1B, 3B, 8B, 70B, 405B."""
    tokenizer_path: Text = "bpe_2048"
    """Built-in name (bpe_2048, byte), tiktoken file (Llama 3's tokenizer.model), or tokenizer.json
    or its folder."""


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
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the update runs: one kernel for all (fused; SGD: foreach), one for each operation
    (foreach), or a plain loop."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LRSchedulerConfig:
    """Warmup, stable, decay: the learning rate as a pure function of the step."""

    warmup_steps: NonNegativeInt = 200
    """Steps over which the rate grows linearly from near 0 to optimizer.lr."""
    total_steps: PositiveInt | None = None
    """Length of the schedule; training.steps if not given. Pin it to be free to change
    training.steps."""
    decay_ratio: Fraction | None = None
    """Part of total_steps spent in decay; if not given the decay starts right after the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this multiple of optimizer.lr."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataLoaderConfig:
    """How samples are read; no setting here changes which samples, or their order."""

    num_workers: NonNegativeInt = 0
    """Processes that read ahead on each rank; 0 reads in the trainer itself."""
    persistent_workers: bool = False
    """For torchtitan's files: here the workers live as long as the run, whatever is said (needs
    num_workers > 0)."""
    pin_memory: bool = False
    """Read into page-locked memory for faster copies to the GPU (CUDA only)."""
    prefetch_factor: PositiveInt | None = None
    """Batches that each worker reads ahead (needs num_workers > 0)."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingConfig:
    """Data, batch sizes, length and precision of the training."""

    steps: PositiveInt = 10000
    """Optimizer steps."""
    seq_len: PositiveInt = 2048
    """Tokens of a sample."""
    local_batch_size: PositiveInt = 8
    """Samples of one forward pass on one data-parallel rank."""
    global_batch_size: int = -1
    """Samples of one optimizer step over all ranks; a multiple of local_batch_size times the
    data-parallel degree, the rest is gradient accumulation. -1: no accumulation."""
    max_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm; inf never clips."""
    dataset: Literal["python_stdlib", "synthetic", "synthetic_masked", "files"] = "python_stdlib"
    """python_stdlib: sources of this Python's library; synthetic: generated text; synthetic_masked:
    the same with a random number of labels a sample masked, for tests; files: what dataset_path
    names."""
    dataset_path: Strings = ()
    """Text (.txt, .md, .py ...), JSONL (.jsonl) or token-store (.bin/.idx) files; globs allowed,
    .gz and .zst too."""
    dataset_weights: Weights = ()
    """One weight for each dataset_path: samples are drawn from them in this proportion. Empty: one
    source."""
    dataset_text_key: str = "text"
    """Key of a JSONL object that holds the text."""
    dataset_cache: Text = "~/.cache/torchtitan"
    """Folder for tokenised data, kept under a fingerprint of the files and the tokenizer."""
    num_epochs: PositiveInt | None = None
    """Passes over the data before the run ends; if not given it repeats, reshuffled, for all
    steps."""
    dataloader: DataLoaderConfig = Field(default_factory=DataLoaderConfig)
    """Workers and prefetch."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of the stored weights and of the optimizer's state."""
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    """Type in which weights are gathered and layers computed."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type in which gradients are summed across ranks."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory; layers visit the GPU."""
    gc_freq: PositiveInt = 50
    """Collect Python garbage every this many steps, on all ranks at once, and never in between."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelismConfig:
    """Degree of each axis; their product is the number of ranks."""

    data_parallel_replicate_degree: Degree = 1
    """Copies of the (sharded) model; gradients are all-reduced across them (DDP, HSDP)."""
    data_parallel_shard_degree: int = -1
    """Ranks over which weights, gradients and optimizer state are sharded (FSDP2); -1: all ranks
    left over."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free the gathered weights after forward (always) or keep them for backward (never); default:
    always, but never under pipeline parallelism."""
    tensor_parallel_degree: Degree = 1
    """Ranks that split each layer's matrices."""
    enable_sequence_parallel: bool = True
    """Under tensor parallelism, split the residual stream along the sequence between the layers'
    matrices, so that norms and their activations are split too."""
    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather the logits of the whole vocabulary on every rank for the
    loss, instead of computing it from the parts."""
    pipeline_parallel_degree: Degree = 1
    """Ranks that split the layers into stages."""
    pipeline_parallel_schedule: Literal[
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    """In which order stages run the forward and backward passes of microbatches."""
    pipeline_parallel_schedule_csv: str = ""
    """File with a schedule of your own, a line of actions for each rank; it takes the place of
    pipeline_parallel_schedule."""
    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Samples of a microbatch; local_batch_size is a multiple of it."""
    pipeline_parallel_num_microbatches: PositiveInt | None = None
    """Microbatches into which local_batch_size is cut, as another way to give their size."""
    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Layers of a stage; if not given, one stage a rank, two for schedules of several, with layers
    dealt out so that the costliest stage costs least."""
    pipeline_parallel_first_stage_less_layers: NonNegativeInt | None = None
    """Layers that the embedding counts for; if not given, what it costs."""
    pipeline_parallel_last_stage_less_layers: NonNegativeInt | None = None
    """Layers that the last norm and the output head count for; if not given, what they cost."""
    context_parallel_degree: Degree = 1
    """Ranks that split each sequence."""
    context_parallel_rotate_method: Literal["allgather", "ring", "alltoall", "ulysses"] = (
        "allgather"
    )
    """How ranks attend to what others hold. allgather: all keys and values come at once; ring: they
    pass from rank to rank (alltoall: torchtitan's name for it); ulysses: ranks exchange parts of
    the sequence for parts of the heads."""
    context_parallel_load_balancer: Literal["headtail", "none"] = "headtail"
    """headtail: each rank holds a chunk near the head of the sequence and one near its tail, so
    that all work alike; none: one contiguous chunk."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """When a run is saved, and from what it starts."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""
    folder: Text = "checkpoint"
    """Folder of the checkpoints, inside dump_folder."""
    interval: PositiveInt = 500
    """Save every this many steps; the last step is always saved."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to see early that saving works."""
    last_save_model_only: bool = False
    """Beside the last checkpoint, which is a full one, write its weights alone to export/step-N
    inside folder."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """disabled: training waits for the files. async: it waits for a copy in memory alone."""
    keep_latest_k: NonNegativeInt = 10
    """Whole checkpoints to keep, older ones are deleted; 0 keeps all."""
    load_step: int = -1
    """Resume from this step; -1: the newest."""
    load_only: bool = False
    """Resume, but never save."""
    mode: Literal["recover", "continue", "finetune"] = "recover"
    """recover: the same run, everything, and no setting that shapes the training may differ.
    continue: weights, optimizer and data position under other settings. finetune: the weights of
    initial_load_path, at step 0. A checkpoint that this very job saved is always recovered."""
    initial_load_path: Text | None = None
    """Where to start from while the run's own folder holds no checkpoint: a step's folder, a folder
    of checkpoints (the newest), or a run's folder."""
    initial_load_model_only: bool = True
    """Take the weights alone from initial_load_path; false takes everything, as mode says."""
    exclude_from_loading: Strings = ()
    """What not to load: components (model, optimizer, lr_scheduler, dataloader, train_state), and
    shell patterns of parameter names, as "output.*", which keep their initial values."""
    verify_on_load: bool = True
    """Compare a checkpoint's files with its checksums before loading it."""
    save_before_seconds: PositiveInt | None = None
    """Seconds after the start of the job at which it saves and ends: its wall-clock limit less a
    margin for a step and a save; if not given it has no limit."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActivationCheckpointConfig:
    """Which activations are recomputed in backward instead of kept."""

    mode: Literal["none", "full", "selective"] = "selective"
    """none: keep all; full: recompute every block; selective: recompute every n-th block."""
    selective_ac_option: str = "2"
    """n of the selective mode, a number in quotes."""


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
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = Field(default_factory=LRSchedulerConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    activation_checkpoint: ActivationCheckpointConfig = Field(
        default_factory=ActivationCheckpointConfig
    )
    comm: CommConfig = Field(default_factory=CommConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
