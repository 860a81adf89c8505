"""What a run trains on and is measured on: the sections [training] and [validation]."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from string import Formatter
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.base.errors import Violation
from torchtitan.config.needs import AtLeast, InsteadOf, Needs, Replaced
from torchtitan.config.types import (
    STRICT,
    FinitePositive,
    ImportPaths,
    LocalPath,
    MinusOneOrMore,
    Own,
    PathOrURL,
    Ranges,
    Share,
    Strings,
    Text,
    Weights,
)

WORKERS = Needs("num_workers", AtLeast(1))
READS_FILES = ("files", "examples")
SUPERVISED = ("examples", "synthetic_examples")
OF_EXAMPLES = Needs("dataset", SUPERVISED)


def template_parts(template: str) -> list[tuple[str, str | None]]:
    """Return text, and the key whose value follows it, in turn; raise ValueError if it is wrong."""
    parts = []
    for literal, key, form, conversion in Formatter().parse(template):
        if key == "" or form or conversion:
            raise ValueError("braces must hold a key alone")
        parts.append((literal, key))
    if not any(key for _, key in parts):
        raise ValueError("no key in braces")
    return parts


def template_rule(error: ValueError) -> str:
    """Say what is wrong with a template."""
    return f'must hold keys in braces, as "{{title}} {{body}}": {error}; mend it'


DatasetKind = Annotated[
    Text,
    Own(
        "python_stdlib",
        "synthetic",
        "synthetic_masked",
        "files",
        "examples",
        "synthetic_examples",
    ),
]


DEFAULT_CACHE = "~/.cache/torchtitan"
DEFAULT_STEPS = 10000


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataLoaderConfig:
    """How samples are read; no setting here changes which samples, or their order."""

    num_workers: NonNegativeInt = 0
    """Processes that read ahead on each rank; 0 reads in the trainer itself."""
    persistent_workers: Annotated[bool, WORKERS] = False
    """For torchtitan's files: here the workers live as long as the run, whatever is said."""
    pin_memory: bool = False
    """Read into page-locked memory for faster copies to the GPU (CUDA only)."""
    prefetch_factor: Annotated[PositiveInt | None, WORKERS] = None
    """Batches that each worker reads ahead."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainingConfig:
    """Data, batch sizes, length and precision of the training."""

    steps: Annotated[int, Field(ge=-1)] = -1
    """Optimizer steps; 0: none, what the job starts from is saved and exported. -1: as many as
    num_epochs takes, or 10000 without it. With both, the run ends at whichever comes first."""
    seq_len: PositiveInt = 2048
    """Tokens of a sample."""
    local_batch_size: PositiveInt = 8
    """Samples of one forward pass on one data-parallel rank."""
    global_batch_size: MinusOneOrMore = -1
    """Samples of one optimizer step over all ranks; a multiple of local_batch_size times the
    data-parallel degree, the rest is gradient accumulation. -1: no accumulation."""
    max_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm; inf never clips."""
    document_attention: Literal["across", "within"] = "across"
    """across: a token attends to all before it in its sample; within: to those of its own document
    alone, and no label crosses a document's end."""
    document_positions: Literal["continue", "restart"] = "continue"
    """Positions count on through a sample, or restart at 0 with each document in it."""
    dataset: DatasetKind = "python_stdlib"
    """python_stdlib: sources of this Python's library; synthetic: generated text; synthetic_masked:
    the same with a random number of labels per sample masked, to compare layouts with; files:
    what dataset_path names; examples: chats, or prompts and completions, of dataset_path, to
    fine-tune on; synthetic_examples: generated ones; or a class of your own: see
    torchtitan.data.own."""
    dataset_path: Annotated[Strings, Needs("dataset", READS_FILES)] = ()
    """Text (.txt, .md, .py ...), JSON (.jsonl, .json), tables (.csv, .tsv, .parquet, .arrow),
    archives of these (.zip, .tar), token stores (.bin/.idx), folders of datasets.save_to_disk;
    globs allowed, .gz and .zst too; or URLs of these, as s3://bucket/corpus/**/*.jsonl."""
    dataset_weights: Annotated[Weights, Needs("dataset", "files")] = ()
    """One weight for each dataset_path: samples are drawn from them in this proportion. Empty: one
    source."""
    dataset_mixture: Annotated[
        dict[Text, FinitePositive],
        Needs("dataset", "files"),
        InsteadOf("dataset_path", "dataset_weights"),
        Replaced(),
    ] = Field(default_factory=dict)
    """A table of files, as in dataset_path, with the weight of each, instead of dataset_path and
    dataset_weights."""
    dataset_text_key: str = "text"
    """Key of a JSON object, or column of a table, that holds the text."""
    dataset_text_template: Annotated[Text | None, Needs("dataset", "files")] = None
    """Text made of several keys, as "{title}\\n{body}", instead of dataset_text_key; a brace is
    written twice."""
    chat_template: Annotated[LocalPath | None, OF_EXAMPLES] = None
    """Jinja file that makes text of the messages of examples; if not given, the template that came
    with the tokenizer."""
    packing: Annotated[
        Literal["packed", "padded"],
        OF_EXAMPLES,
        Needs("document_attention", "within"),
    ] = "padded"
    """padded: a sample is one example; packed: as many as it holds, kept apart by
    document_attention."""
    long_examples: Annotated[Literal["truncate", "skip"], OF_EXAMPLES] = "truncate"
    """What becomes of an example longer than seq_len: its beginning is kept, or it is left out."""
    dataset_cache: PathOrURL = DEFAULT_CACHE
    """Folder for tokenised data, kept under a fingerprint of the files and the tokenizer; or a URL,
    for machines to share it by."""
    skip_samples: Ranges = ()
    """Samples that are not trained on, by ranges of their first and last number in the order of the
    run, as [[100, 199]]; the order of all others stays. On the command line: 100-199 400-415."""
    num_epochs: PositiveInt | None = None
    """Passes over the data before the run ends; if not given it repeats, reshuffled, for all
    steps. The learning rate is planned over the steps that the run takes."""
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
    loss: Annotated[Text, Own("cross_entropy")] = "cross_entropy"
    """What is minimised, a loss of each token: cross-entropy, or a function of your own, from
    float32 logits (tokens, vocabulary) and labels (tokens) to losses (tokens)."""
    callbacks: ImportPaths = ()
    """Classes of your own that follow the run: see torchtitan.callbacks.Callbacks."""
    loss_chunks: NonNegativeInt = 0
    """Chunks of tokens whose logits exist one after the other; 1: all at once. 0: as many as the
    sizes call for."""
    gc_freq: PositiveInt = 50
    """Collect Python garbage every this many steps, on all ranks at once, and never in between."""

    def __post_init__(self) -> None:
        """Settle the default; with num_epochs it follows from the data, at assembly."""
        if self.steps == -1 and self.num_epochs is None:
            object.__setattr__(self, "steps", DEFAULT_STEPS)

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the entries that name files."""
        return tuple(self.dataset_mixture) or self.dataset_path

    @property
    def weights(self) -> tuple[float, ...]:
        """Return the weight of each entry; empty if they are one source."""
        return tuple(self.dataset_mixture.values()) or self.dataset_weights

    def violations(self) -> Iterator[Violation]:
        """Check paths, weights, template and batch."""
        if self.dataset in READS_FILES and not self.paths:
            keys = ("dataset", "dataset_path", "dataset_mixture")
            yield Violation(keys, "needs dataset_path; name the files to read")
        num_paths, num_weights = len(self.dataset_path), len(self.dataset_weights)
        if num_weights and self.dataset == "files" and num_weights != num_paths:
            yield Violation(
                ("dataset_weights", "dataset_path"),
                f"must hold one weight for each dataset_path, got {num_weights} for {num_paths}",
            )
        ends = [number for one in self.skip_samples for number in one]
        # the first of a range may be its last; each begins behind the one before
        if any(a > b or (i % 2 and a == b) for i, (a, b) in enumerate(pairwise(ends))):
            rule = (
                f"must hold ranges of a first and a last number, in order and apart, got "
                f"{[list(one) for one in self.skip_samples]}; correct it"
            )
            yield Violation(("skip_samples",), rule)
        yield from self._template_violations()
        whole, local = self.global_batch_size, self.local_batch_size
        if whole != -1 and whole % local:
            yield Violation(
                ("global_batch_size", "local_batch_size"),
                f"must be -1 or a multiple of local_batch_size ({local}), got {whole}; "
                f"try {max(whole // local, 1) * local}",
            )

    def _template_violations(self) -> Iterator[Violation]:
        key, template = "dataset_text_template", self.dataset_text_template
        if template is None:
            return
        try:
            template_parts(template)
        except ValueError as error:
            yield Violation((key,), template_rule(error))
        if self.dataset_text_key != "text":
            rule = "is another way to say dataset_text_key; remove one"
            yield Violation((key, "dataset_text_key"), rule)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationConfig:
    """The loss on data that are not trained on; what is not said here is as in [training]."""

    enable: bool = False
    """Measure the loss on held-out data; it changes no number of the training."""
    dataset: DatasetKind | None = None
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

    def violations(self) -> Iterator[Violation]:
        """Check the number of batches, and that a part of the training's data is not named beside
        other data."""
        if self.enable and self.steps < 1 and self.steps != -1:
            yield Violation(("steps", "enable"), f"must be -1 or at least 1, got {self.steps}")
        if self.split is not None and (self.dataset or self.dataset_path):
            yield Violation(
                ("split", "dataset", "dataset_path"),
                "holds out documents of the training's data, and cannot be given together with "
                "dataset or dataset_path; remove either",
            )
