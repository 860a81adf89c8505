"""The settings of the ranks: the sections [parallelism], [comm] and [elastic]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from annotated_types import Ge

from torchtitan.base.errors import Violation
from torchtitan.config.schema import (
    LocalPath,
    MinusOneOrMore,
    NonNegativeInt,
    Parse,
    PositiveInt,
    Text,
    named_or_number,
)

Balancer = Literal["headtail", "balanced", "none"]
CHUNKS_A_RANK: Mapping[Balancer, int] = {"headtail": 2, "balanced": 8, "none": 1}
"""How finely a sequence is cut for its ranks: eight chunks leave a choice."""
CUTS_SEQUENCES = (
    "context_parallel_degree",
    "context_parallel_load_balancer",
    "tensor_parallel_degree",
    "enable_sequence_parallel",
)


def _number_as_text(value: object) -> object:
    return str(value) if type(value) is int else value


def _split(value: object) -> object:
    return value.split(",") if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """Degree of each axis; their product is the number of ranks."""

    data_parallel_replicate_degree: Annotated[int, Ge(1)] = 1
    """Copies of the (sharded) model; gradients are all-reduced across them (DDP, HSDP)."""
    data_parallel_shard_degree: MinusOneOrMore = -1
    """Ranks over which weights, gradients and optimizer state are sharded (FSDP2); -1: all ranks
    left over."""
    fsdp_reshard_after_forward: Annotated[
        Text, Parse(_number_as_text), named_or_number("default", "always", "never")
    ] = "default"
    """Free the gathered weights after forward (always) or keep them for backward (never); default:
    always but for the last block, never under pipeline parallelism. A number: as default, but so
    many ranks keep the weights together, for backward to gather them from near by; 1 is never, all
    ranks that share the weights are always."""
    tensor_parallel_degree: Annotated[int, Ge(1)] = 1
    """Ranks that split each layer's matrices."""
    enable_sequence_parallel: bool = True
    """Under tensor parallelism, split the residual stream along the sequence between the layers'
    matrices, so that norms and their activations are split too."""
    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather the logits of the whole vocabulary on every rank for the
    loss, instead of computing it from the parts."""
    expert_parallel_degree: Annotated[int, Ge(1)] = 1
    """Ranks that each hold a part of the experts of a layer, whole ones; tokens are sent to them.
    It divides the experts and data_parallel_shard_degree x context_parallel_degree x
    tensor_parallel_degree, whose ranks they are: it adds none."""
    pipeline_parallel_degree: Annotated[int, Ge(1)] = 1
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
    module_fqns_per_model_part: tuple[Annotated[tuple[Text, ...], Parse(_split)], ...] = ()
    """The modules of each stage, a list of names for every one, as [["tok_embeddings", "layers.0"],
    ["layers.1", "norm", "output"]]; on the command line a word a stage, with commas. Empty: layers
    are dealt out so that the costliest stage costs least."""
    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Layers of a stage, on average: it sets the number of stages. If not given, one stage a rank,
    two for schedules of several."""
    pipeline_parallel_first_stage_less_layers: NonNegativeInt | None = None
    """Layers that the embedding counts for; if not given, what it costs."""
    pipeline_parallel_last_stage_less_layers: NonNegativeInt | None = None
    """Layers that the last norm and the output head count for; if not given, what they cost."""
    context_parallel_degree: Annotated[int, Ge(1)] = 1
    """Ranks that split each sequence."""
    context_parallel_rotate_method: Literal["allgather", "ring", "alltoall", "ulysses"] = (
        "allgather"
    )
    """How ranks attend to what others hold. allgather: all keys and values come at once; ring: they
    pass from rank to rank (alltoall: torchtitan's name for it); ulysses: ranks exchange parts of
    the sequence for parts of the heads."""
    context_parallel_load_balancer: Balancer = "headtail"
    """headtail: each rank holds a chunk near the head of the sequence and one near its tail, so
    that all work alike; balanced: eight chunks, chosen for each sequence so that all work alike
    whatever its documents (not for ulysses, which needs no balance); none: one contiguous chunk."""

    def violations(self) -> Iterator[Violation]:
        """Check the stages of a pipeline, and the balance of context parallelism."""
        layers = self.pipeline_parallel_layers_per_stage
        staged = self.pipeline_parallel_degree > 1 and layers is not None
        if staged and self.module_fqns_per_model_part:
            yield Violation(
                ("module_fqns_per_model_part", "pipeline_parallel_layers_per_stage"),
                f"lists the stages, but pipeline_parallel_layers_per_stage = {layers} asks for "
                "others; remove one",
            )
        balancer = self.context_parallel_load_balancer
        is_ulysses = self.context_parallel_rotate_method == "ulysses"
        if self.context_parallel_degree > 1 and is_ulysses and balancer == "balanced":
            yield Violation(
                ("context_parallel_load_balancer", "context_parallel_rotate_method"),
                'is for "ring" and "allgather": under "ulysses" every rank attends over the whole '
                'sequence with its own heads, so all work alike; write "headtail" or "none"',
            )

    def microbatch_size(self, local_batch_size: int) -> int:
        """Return the samples of a pipeline's microbatch."""
        number = self.pipeline_parallel_num_microbatches
        if number is None:
            return self.pipeline_parallel_microbatch_size
        return max(1, local_batch_size // number)

    def microbatch_violation(self, local_batch_size: int) -> Violation | None:
        """Say what is wrong with the microbatches of training.local_batch_size, if anything is."""
        size = self.pipeline_parallel_microbatch_size
        number = self.pipeline_parallel_num_microbatches
        if self.pipeline_parallel_degree == 1:
            return None
        prefix = "parallelism.pipeline_parallel"
        ties = ("training.local_batch_size", f"{prefix}_degree")
        keys = (f"{prefix}_num_microbatches", f"{prefix}_microbatch_size")
        if number is None and local_batch_size % size:
            return Violation(
                (keys[1], *ties),
                f"must divide local_batch_size ({local_batch_size}), got {size}; try "
                f"local_batch_size = {local_batch_size // size * size or size}, or set "
                "pipeline_parallel_num_microbatches",
            )
        if number is not None and size not in (1, local_batch_size // number):
            return Violation(
                (*keys, *ties),
                f"is another way to say pipeline_parallel_microbatch_size, but both are given: "
                f"{number} microbatches of local_batch_size {local_batch_size}, and size {size}; "
                "remove one of them",
            )
        if number is not None and local_batch_size % number:
            fits = [str(n) for n in range(1, local_batch_size + 1) if local_batch_size % n == 0]
            return Violation(
                (keys[0], *ties),
                f"must divide local_batch_size ({local_batch_size}), got {number}; try "
                f"{', '.join(fits)}",
            )
        return None

    def sequence_violation(self, seq_len: int, *, key: str) -> Violation | None:
        """Say what a sequence that is cut for several ranks must be a multiple of, if it is not.

        `key`: the path of the setting that gives its length.
        """
        cp, tp = self.context_parallel_degree, self.tensor_parallel_degree
        balancer, factors, otherwise = self.context_parallel_load_balancer, {}, ""
        if cp > 1:
            factors["context_parallel_degree"] = cp
            factors[f"chunks per rank under {balancer}"] = CHUNKS_A_RANK[balancer]
        if tp > 1 and self.enable_sequence_parallel:
            factors["tensor_parallel_degree under sequence parallelism"] = tp
            otherwise = ", or set parallelism.enable_sequence_parallel = false"
        multiple = prod(factors.values())
        if seq_len % multiple == 0:
            return None
        product = " x ".join(f"{n} {name}" for name, n in factors.items() if n > 1)
        return Violation(
            (key, *(f"parallelism.{tie}" for tie in CUTS_SEQUENCES)),
            f"must be a multiple of {multiple} ({product}), got {seq_len}; "
            f"try {max(seq_len // multiple, 1) * multiple}{otherwise}",
        )


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Process groups."""

    init_timeout_seconds: PositiveInt = 300
    """Longest wait for other ranks until the first step of this start is done."""
    train_timeout_seconds: PositiveInt = 100
    """Longest wait for other ranks after that."""
    trace_buf_size: NonNegativeInt = 20000
    """Collectives remembered by torch's flight recorder, written to save_traces_folder when one
    takes too long; 0: off."""
    save_traces_folder: LocalPath = "comm_traces"
    """Folder of the flight recorder's files, inside dump_folder."""
    save_traces_file_prefix: str = "rank_"
    """Beginning of the flight recorder's file names."""


@dataclass(frozen=True, kw_only=True)
class ElasticConfig:
    """Runs that outlive a node: jobs started with a range of nodes, `--nnodes 2:4`."""

    adjustable_degrees: tuple[Literal["dp_shard", "dp_replicate"], ...] = ("dp_shard",)
    """Degrees that may differ from those on all nodes while nodes are missing: dp_shard is
    parallelism.data_parallel_shard_degree, dp_replicate data_parallel_replicate_degree. All others
    stay, and so does the global batch."""
