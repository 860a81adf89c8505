"""The sections [training] and [validation]: data, samples and batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from string import Formatter
from typing import Annotated, Literal

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import Violation
from torchtitan.config.settings import (
    ENABLED,
    IMPORT_PATH,
    CustomObject,
    FinitePositive,
    ImportPath,
    LocalPath,
    MinusOneOrMore,
    NonNegativeInt,
    Options,
    Parse,
    PositiveInt,
    Range,
    Requires,
    Rule,
    Text,
)

WORKERS = Requires("num_workers", ENABLED)
READS_FILES = ("files", "examples", "preferences")
PREFERENCES = ("preferences", "synthetic_preferences")
SUPERVISED = ("examples", "synthetic_examples", *PREFERENCES)
OF_PAIRS = ("dpo", "ipo", "simpo", "orpo")
"""Losses of preferences."""
OF_EXAMPLES = Requires("dataset", SUPERVISED)


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Return pairs of literal text and the key that follows it; raise ValueError if it is wrong."""
    parts = [*Formatter().parse(template)]
    keys = [key for _, key, form, conversion in parts if not (form or conversion)]
    if len(keys) < len(parts) or "" in keys or not any(keys):
        raise ValueError('must hold keys in braces, and nothing else in them, as "{title} {body}"')
    return [(literal, key) for literal, key, *_ in parts]


DatasetKind = Annotated[
    Text,
    ImportPath(
        "python_stdlib",
        "synthetic",
        "synthetic_masked",
        "files",
        "examples",
        "synthetic_examples",
        "preferences",
        "synthetic_preferences",
    ),
]


def _parse_range(value: object) -> object:
    """Return "100-199" as a pair of numbers."""
    first, dash, last = value.partition("-") if isinstance(value, str) else ("", "", "")
    return (int(first), int(last)) if dash and f"{first}{last}".isdecimal() else value


def _is_pair(value: tuple[int, ...]) -> None:
    if len(value) != 2:
        raise ValueError("must have a first and a last number")


SampleRange = Annotated[tuple[Annotated[int, Range(ge=0)], ...], Parse(_parse_range), _is_pair]
HAS_OPTIONS = Rule(
    f"= {', '.join(OF_PAIRS)} or package.module:NAME",
    lambda value: value in OF_PAIRS or is_import_path(value),
)
DEFAULT_CACHE = "~/.cache/torchtitan"
FETCHED = "fetched"
"""Folder of the cache that holds copies of objects."""
SAVED = "state.json"
"""File that `datasets.save_to_disk` writes beside its .arrow files, and that lists them."""
DEFAULT_STEPS = 10000
BatchSize = Annotated[int, Range(gt=0, le=10**6)]


@dataclass(frozen=True, kw_only=True)
class DataLoaderConfig:
    """How samples are read. No setting here changes the samples or their order."""

    num_workers: NonNegativeInt = 0
    """Processes that read ahead on each rank. 0 reads in the trainer."""
    persistent_workers: Annotated[bool, WORKERS] = False
    """Keep the workers at the end of the data, until the loader is closed."""
    pin_memory: bool = False
    """Read into page-locked memory for faster copies to the GPU (CUDA only)."""
    prefetch_factor: Annotated[PositiveInt | None, WORKERS] = None
    """Batches that each worker reads ahead."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Data, batch sizes, length and precision of the training."""

    steps: Annotated[int, Range(ge=-1)] = -1
    """Optimizer steps. 0: check the job and train nothing. -1: the steps of num_epochs,
    or 10000 without it. With both, the run ends at the earlier one."""
    seq_len: Annotated[int, Range(gt=0, le=10**9)] = 2048
    """Tokens per sample."""
    local_batch_size: BatchSize = 8
    """Samples per forward pass on one data-parallel rank."""
    global_batch_size: Annotated[MinusOneOrMore, Range(le=10**9)] = -1
    """Samples per optimizer step over all ranks, a multiple of local_batch_size times the
    data-parallel degree. The rest is gradient accumulation. -1: no accumulation."""
    max_norm: Annotated[float, Range(gt=0)] = 1.0
    """Gradients are clipped to this global norm; inf never clips."""
    attn_mask_type: Literal["causal", "block_causal"] = "causal"
    """causal: a token attends to all previous tokens of its sample. block_causal: only to previous
    tokens of its document, and no label crosses a document's end."""
    reset_positions: bool = False
    """Count positions from 0 in each document, instead of through the sample."""
    dataset: Annotated[
        DatasetKind,
        Requires("loss", OF_PAIRS, 'set loss = "dpo"', of=PREFERENCES),
        Requires("attn_mask_type", "block_causal", of=PREFERENCES),
        Requires("reset_positions", True, of=PREFERENCES),
    ] = "python_stdlib"
    """python_stdlib: sources of this Python's library; synthetic: generated text; synthetic_masked:
    the same with a random number of labels per sample masked, to compare layouts; files: the files
    of dataset_path; examples: chats, or prompts and completions, of dataset_path, to fine-tune on;
    synthetic_examples: generated examples; preferences, synthetic_preferences: the same of pairs of
    answers; or a custom class: see torchtitan.data.custom."""
    dataset_options: Annotated[Options, Requires("dataset", IMPORT_PATH)] = field(
        default_factory=dict
    )
    """Keyword arguments of a custom dataset."""
    dataset_path: Annotated[tuple[Text, ...], Requires("dataset", READS_FILES)] = ()
    """Text (.txt, .md, .py ...), JSON (.jsonl, .json), tables (.csv, .parquet, .arrow), token
    stores (.bin/.idx), folders of datasets.save_to_disk; text compressed as .gz and .zst; globs and
    folders of these; or URLs, as s3://bucket/corpus/**/*.jsonl."""
    dataset_weights: Annotated[tuple[FinitePositive, ...], Requires("dataset", READS_FILES)] = ()
    """One weight per dataset_path: samples are drawn in this proportion. Empty: one source."""
    dataset_text_key: str = "text"
    """Key of a JSON object, or column of a table, that holds the text."""
    dataset_text_template: Annotated[Text | None, Requires("dataset", "files")] = None
    """Text made of several keys, as "{title}\\n{body}", instead of dataset_text_key. Write a brace
    twice."""
    chat_template: Annotated[LocalPath | None, OF_EXAMPLES] = None
    """Jinja file that renders the messages of examples. Default: the tokenizer's template."""
    packing: Annotated[
        Literal["packed", "padded"],
        OF_EXAMPLES,
        Requires("attn_mask_type", "block_causal"),
    ] = "padded"
    """padded: a sample is one example. packed: a sample holds several examples, separated by
    attn_mask_type."""
    train_on: Annotated[
        Literal["all", "last", "each"],
        Requires("dataset", ("examples", "synthetic_examples")),
    ] = "all"
    """Answers of a chat that have labels: all; the last; or each in an example of its own, which
    has the text of inference also if a template writes earlier answers differently."""
    long_examples: Annotated[Literal["truncate", "skip"], OF_EXAMPLES] = "truncate"
    """Cut an example longer than seq_len at its end, a pair at the beginning of its prompt, or skip
    it."""
    special_tokens_in_examples: Annotated[Literal["refuse", "encode"], OF_EXAMPLES] = "refuse"
    """Names of special tokens in the text of examples are an error, or encode: mean the tokens."""
    dataset_cache: LocalPath = DEFAULT_CACHE
    """Folder for tokenized data, named by a fingerprint of the files and the tokenizer."""
    skip_samples: tuple[SampleRange, ...] = ()
    """Samples to skip, as ranges of their first and last number in the order of the run, such as
    [[100, 199]]. The order of the other samples stays. On the command line: 100-199 400-415."""
    num_epochs: PositiveInt | None = None
    """Passes over the data before the run ends. Default: repeat, reshuffled, for all steps. The
    learning rate is planned over the steps that the run takes."""
    dataloader: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    """Workers and prefetch."""
    dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of the stored weights and of the optimizer's state."""
    mixed_precision_param: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of gathered weights and of computation. auto: bfloat16 if the devices of all ranks
    multiply it natively (or the weights are stored in it), else float32."""
    attention_kernel: Annotated[
        Literal["auto", "flash", "flash3", "flash4"],
        Requires("mixed_precision_param", ("auto", "bfloat16")),
    ] = "auto"
    """Preferred kernel of attention on a GPU. auto: torch's, cuDNN's on Hopper and Blackwell.
    flash: flash attention 2, which always computes sinks and sequences over several ranks. flash3,
    flash4: newer versions in its place, from packages flash_attn_interface, flash_attn.cute."""
    mixed_precision_reduce: Literal["float32"] = "float32"
    """Type of gradients while they are summed across ranks."""
    enable_cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory, and copy layers to the GPU."""
    loss: Annotated[
        Text,
        ImportPath("cross_entropy", *OF_PAIRS),
        Requires("dataset", PREFERENCES, 'set dataset = "preferences"', of=OF_PAIRS),
    ] = "cross_entropy"
    """Loss per token: cross-entropy, or a custom function from float32 logits (tokens, vocabulary)
    and labels (tokens) to losses (tokens). Loss per pair of answers: dpo, ipo, simpo, orpo."""
    loss_options: Annotated[Options, Requires("loss", HAS_OPTIONS)] = field(default_factory=dict)
    """Keyword arguments of a custom loss, or numbers of a loss of pairs: beta, label_smoothing of
    dpo, gamma of simpo."""
    callbacks: tuple[CustomObject, ...] = ()
    """Custom classes that follow the run, as {path = "package.module:NAME", ...} with their keyword
    arguments, or the path alone: see torchtitan.callbacks.Callbacks."""
    loss_chunks: NonNegativeInt = 0
    """Number of chunks of tokens whose logits are computed in turn. 1: all at once. 0: chosen by
    the sizes."""
    gc_freq: PositiveInt = 50
    """Steps between collections of Python garbage, on all ranks at the same step."""

    def __post_init__(self) -> None:
        """Set the default. With num_epochs it follows from the data, when the run is built."""
        if self.steps == -1 and self.num_epochs is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)

    def violations(self) -> Iterator[Violation]:
        """Check paths, weights, cache, template and batch."""
        if self.dataset in READS_FILES and not self.dataset_path:
            yield Violation(("dataset", "dataset_path"), "needs dataset_path")
        num_paths, num_weights = len(self.dataset_path), len(self.dataset_weights)
        if num_weights and self.dataset in READS_FILES and num_weights != num_paths:
            yield Violation(
                ("dataset_weights", "dataset_path"),
                f"must hold one weight for each dataset_path, got {num_weights} for {num_paths}",
            )
        ends = [number for pair in self.skip_samples for number in pair]
        # a range may hold one number; each range starts after the previous one
        if any(a > b or (i % 2 and a == b) for i, (a, b) in enumerate(pairwise(ends))):
            rule = (
                f"must hold ranges of a first and a last number, in order and apart, got "
                f"{[list(pair) for pair in self.skip_samples]}; correct it"
            )
            yield Violation(("skip_samples",), rule)
        yield from self._template_violations()
        total, local = self.global_batch_size, self.local_batch_size
        if total != -1 and total % local:
            yield Violation(
                ("global_batch_size", "local_batch_size"),
                f"must be -1 or a multiple of local_batch_size ({local}) x data-parallel ranks, "
                f"got {total}",
            )

    def _template_violations(self) -> Iterator[Violation]:
        key, template = "dataset_text_template", self.dataset_text_template
        if template is None:
            return
        try:
            template_parts(template)
        except ValueError as error:
            yield Violation((key,), str(error))
        if self.dataset_text_key != "text":
            rule = "replaces dataset_text_key; remove one"
            yield Violation((key, "dataset_text_key"), rule)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Validation on data that are not trained on. Other settings are taken from [training]."""

    enable: bool = False
    """Measure the loss on held-out data. It changes no number of the training."""
    dataset: DatasetKind | None = None
    """Kind of data, as training.dataset, which is the default. Of generated data, a part that is
    never trained on."""
    dataset_options: Annotated[Options, Requires("dataset", IMPORT_PATH)] = field(
        default_factory=dict
    )
    """Keyword arguments of a custom dataset."""
    dataset_path: tuple[Text, ...] = ()
    """Files to measure the loss on, as training.dataset_path."""
    holdout_fraction: Annotated[float, Range(gt=0, lt=1)] | None = None
    """Fraction of the training documents to hold out and measure the loss on, chosen by a hash of
    their content, instead of dataset. They are held out even if enable is false."""
    local_batch_size: BatchSize | None = None
    """Samples per forward pass on one data-parallel rank. Default: training's."""
    seq_len: PositiveInt | None = None
    """Tokens per sample. Default: training's."""
    freq: PositiveInt = 10
    """Steps between validations. The first and the last step are always validated."""
    steps: int = -1
    """A validation reads the samples of this many training steps, always the same ones, in any
    layout with that batch. -1: all samples, each once."""
    dataloader: DataLoaderConfig = field(default_factory=DataLoaderConfig)
    """Workers and prefetch, started for each validation."""

    def violations(self) -> Iterator[Violation]:
        """Check the number of batches, and that documents are held out only without other data."""
        if self.enable and self.steps < 1 and self.steps != -1:
            yield Violation(("steps", "enable"), f"must be -1 or at least 1, got {self.steps}")
        if self.holdout_fraction is not None and (self.dataset or self.dataset_path):
            yield Violation(
                ("holdout_fraction", "dataset", "dataset_path"),
                "holds out documents of the training data, and cannot be combined with dataset or "
                "dataset_path; remove either",
            )
