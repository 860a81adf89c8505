"""The settings of a job: one frozen dataclass for each TOML section.

Names and meanings follow torchtitan 0.2 wherever they are the same; `compat.py` maps older names
and refuses by name what is not built. The docstring under a field is its documentation: `--help`
prints it. Types are strict (2.5 is no batch size), values are checked by pydantic, and rules that
tie several fields together stand in `rules.py`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.parallelism import ParallelismConfig as ParallelismConfig
from torchtitan.config.rope import RopeScalingConfig as RopeScalingConfig
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
    Weights,
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
    """Size within the family, e.g. debugmodel, 1B, 3B, 8B, 70B, 405B."""
    tokenizer_path: Text = "bpe_2048"
    """Built-in name (bpe_2048, byte), tiktoken file (Llama 3's tokenizer.model), or tokenizer.json
    or its folder."""
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
    document_attention: Literal["across", "within"] = "across"
    """across: a token attends to all before it in its sample; within: to those of its own document
    alone, and no label crosses a document's end."""
    document_positions: Literal["continue", "restart"] = "continue"
    """Positions count on through a sample, or restart at 0 with each document in it."""
    dataset: Literal[
        "python_stdlib", "synthetic", "synthetic_masked", "files", "examples", "synthetic_examples"
    ] = "python_stdlib"
    """python_stdlib: sources of this Python's library; synthetic: generated text; synthetic_masked:
    the same with a random number of labels a sample masked, for tests; files: what dataset_path
    names; examples: chats, or prompts and completions, of dataset_path, to fine-tune on;
    synthetic_examples: generated ones."""
    dataset_path: Strings = ()
    """Text (.txt, .md, .py ...), JSONL (.jsonl) or token-store (.bin/.idx) files; globs allowed,
    .gz and .zst too."""
    dataset_weights: Weights = ()
    """One weight for each dataset_path: samples are drawn from them in this proportion. Empty: one
    source."""
    dataset_text_key: str = "text"
    """Key of a JSONL object that holds the text."""
    chat_template: Text | None = None
    """Jinja file that makes text of the messages of examples; if not given, the template that came
    with the tokenizer."""
    packing: Literal["packed", "padded"] = "padded"
    """padded: a sample is one example; packed: as many as it holds (examples only)."""
    long_examples: Literal["truncate", "skip"] = "truncate"
    """What becomes of an example longer than seq_len: its beginning is kept, or it is left out."""
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
    loss_chunks: NonNegativeInt = 0
    """Chunks of tokens whose logits exist one after the other; 1: all at once. 0: as many as the
    sizes call for."""
    gc_freq: PositiveInt = 50
    """Collect Python garbage every this many steps, on all ranks at once, and never in between."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """When a run is saved, and from what it starts."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""
    folder: Text = "checkpoint"
    """Folder of the checkpoints, always inside dump_folder."""
    interval: PositiveInt = 500
    """Save every this many steps; the last step is always saved."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to see early that saving works."""
    last_save_model_only: bool = False
    """Beside the last checkpoint, which is a full one, write its weights alone to export/step-N
    inside folder."""
    last_save_in_hf: bool = False
    """Write them as a folder of Hugging Face instead, whether last_save_model_only is on or not."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights under last_save_in_hf."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training waits for the files. async: it waits for a copy in memory alone.
    async_with_pinned_mem: the same from GPUs, into page-locked memory."""
    keep_latest_k: NonNegativeInt = 10
    """Whole checkpoints to keep beside that of load_step, older ones are deleted; 0 keeps all."""
    load_step: int = -1
    """Go back to this step, and set aside all later ones; -1: the newest."""
    load_only: bool = False
    """Resume, but never save; figures go to metrics.load_only.jsonl."""
    mode: Literal["recover", "continue", "finetune"] = "recover"
    """recover: the same run, everything, and no setting that shapes the training may differ.
    continue: weights, optimizer and data position under other settings. finetune: the weights of
    initial_load_path, at step 0. A checkpoint that this very job saved is always recovered."""
    initial_load_path: Text | None = None
    """Where to start from while the run's own folder holds no checkpoint: a step's folder, a folder
    of checkpoints (the newest), or a run's folder."""
    initial_load_model_only: bool = True
    """Take the weights alone from initial_load_path; false takes everything, as mode says."""
    initial_load_in_hf: bool = False
    """initial_load_path is a folder of Hugging Face: config.json and safetensors files."""
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
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    activation_checkpoint: ActivationCheckpointConfig = Field(
        default_factory=ActivationCheckpointConfig
    )
    compile: CompileConfig = Field(default_factory=CompileConfig)
    comm: CommConfig = Field(default_factory=CommConfig)
    debug: DebugConfig = Field(default_factory=DebugConfig)
