"""What a run trains on and is measured on: the sections [training] and [validation]."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.types import STRICT, Share, Strings, Text, Weights


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
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type in which weights are gathered and layers computed. auto: bfloat16 where the devices of
    all ranks multiply it by themselves (or the weights are stored in it), else float32."""
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
class ValidationConfig:
    """The loss on data that are not trained on; what is not said here is as in [training]."""

    enable: bool = False
    """Measure the loss on held-out data; it changes no number of the training."""
    dataset: (
        Literal[
            "python_stdlib",
            "synthetic",
            "synthetic_masked",
            "files",
            "examples",
            "synthetic_examples",
        ]
        | None
    ) = None
    """Kind of data, as training.dataset, which it is if not given; of the generated ones a part
    that is never trained on."""
    dataset_path: Strings = ()
    """Files to measure the loss on, of the kinds that training.dataset_path takes."""
    split: Share | None = None
    """Part of the training's documents to hold out of the training and measure the loss on, chosen
    by a hash of their content; instead of dataset. They are held out while enable is false too."""
    local_batch_size: PositiveInt | None = None
    """Samples of one forward pass on one data-parallel rank; training's if not given."""
    seq_len: PositiveInt | None = None
    """Tokens of a sample; training's if not given."""
    freq: PositiveInt = 10
    """Validate every this many steps; the first and the last step are always validated."""
    steps: int = -1
    """Batches of one validation, always the same; -1: all samples, each once."""
    dataloader: DataLoaderConfig = Field(default_factory=DataLoaderConfig)
    """Workers and prefetch, started anew for each validation."""
