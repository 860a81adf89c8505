"""Settings of the ranks: the sections [parallelism] and [comm]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from torchtitan.base.errors import Violation
from torchtitan.config.settings import (
    LocalPath,
    MinusOneOrMore,
    NameOrNumber,
    NonNegativeInt,
    Parse,
    PositiveInt,
    Text,
)

WholeBackward = Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"]
SplitBackward = Literal["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
Balancer = Literal["headtail", "balanced", "none"]
CHUNKS_A_RANK: Mapping[Balancer, int] = {"headtail": 2, "balanced": 8, "none": 1}
"""Chunks of a sequence per rank. Eight chunks allow different assignments."""
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

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the (sharded) model; gradients are all-reduced across them (DDP, HSDP)."""
    data_parallel_shard_degree: MinusOneOrMore = -1
    """Ranks over which weights, gradients and optimizer state are sharded (FSDP2); -1: all ranks
    left over."""
    fsdp_reshard_after_forward: Annotated[
        Text, Parse(_number_as_text), NameOrNumber("default", "always", "never")
    ] = "default"
    """Free the gathered weights after forward (always) or keep them for backward (never); default:
    always except for the last block, never under pipeline parallelism. A number N: as default, but
    after forward the weights stay sharded over groups of N ranks, so that backward gathers them
    from nearby ranks; 1 means never, the number of ranks that share the weights means always."""
    tensor_parallel_degree: PositiveInt = 1
    """Ranks that split each layer's matrices."""
    enable_sequence_parallel: bool = True
    """Under tensor parallelism, shard the residual stream along the sequence between the layers'
    matrices, so that norms and their activations are sharded too."""
    disable_loss_parallel: bool = False
    """Under tensor parallelism, gather the logits of the full vocabulary on every rank for the
    loss, instead of computing it from sharded logits."""
    expert_parallel_degree: PositiveInt = 1
    """Ranks over which the experts of a layer are distributed; tokens are sent to them. It must
    divide the number of experts and data_parallel_shard_degree x context_parallel_degree x
    tensor_parallel_degree, whose ranks it uses; it adds no ranks."""
    pipeline_parallel_degree: PositiveInt = 1
    """Ranks that split the layers into stages."""
    pipeline_parallel_schedule: Literal[WholeBackward, SplitBackward] = "1F1B"
    """Order of the forward and backward passes of microbatches in each stage."""
    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Samples of a microbatch; local_batch_size is a multiple of it."""
    module_fqns_per_model_part: tuple[Annotated[tuple[Text, ...], Parse(_split)], ...] = ()
    """Names of the modules of each stage: [["tok_embeddings", "layers.0"], ["layers.1", "norm",
    "output"]]; on the command line one comma-separated word per stage. Empty: layers are assigned
    so that the most expensive stage costs least."""
    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Layers per stage, with embedding and head as 1 each or as below; sets the number of stages.
    If not given, one stage per rank, or two for schedules with several."""
    pipeline_parallel_first_stage_less_layers: NonNegativeInt | None = None
    """Layers that the embedding counts as; by default 1 under layers_per_stage, else its cost."""
    pipeline_parallel_last_stage_less_layers: NonNegativeInt | None = None
    """Layers that norm and head count as; by default 1 under layers_per_stage, else their cost."""
    context_parallel_degree: PositiveInt = 1
    """Ranks that split each sequence."""
    context_parallel_rotate_method: Literal["allgather", "ring", "alltoall", "ulysses"] = (
        "allgather"
    )
    """How ranks attend to keys and values of other ranks. allgather: gather all at once; ring: pass
    them from rank to rank (torchtitan calls it alltoall); ulysses: exchange parts of the sequence
    for parts of the heads."""
    context_parallel_load_balancer: Balancer = "headtail"
    """headtail: each rank holds a chunk near the head of the sequence and one near its tail, which
    balances causal attention; balanced: eight chunks, chosen for each sequence to balance its
    documents (not for ulysses, which needs no balancing); none: one contiguous chunk."""

    def violations(self) -> Iterator[Violation]:
        """Check the stages of a pipeline and the load balancer of context parallelism."""
        layers = self.pipeline_parallel_layers_per_stage
        staged = self.pipeline_parallel_degree > 1 and layers is not None
        if staged and self.module_fqns_per_model_part:
            yield Violation(
                ("module_fqns_per_model_part", "pipeline_parallel_layers_per_stage"),
                f"lists the stages, so remove pipeline_parallel_layers_per_stage = {layers}",
            )
        balancer = self.context_parallel_load_balancer
        is_ulysses = self.context_parallel_rotate_method == "ulysses"
        if self.context_parallel_degree > 1 and is_ulysses and balancer == "balanced":
            yield Violation(
                ("context_parallel_load_balancer", "context_parallel_rotate_method"),
                'must be "headtail" or "none" under "ulysses", got "balanced": each rank attends '
                "over the full sequence with some of the heads, so the load is balanced",
            )

    def microbatch_violation(self, local_batch_size: int) -> Violation | None:
        """Return the violated rule about microbatches of training.local_batch_size, if any."""
        size = self.pipeline_parallel_microbatch_size
        if self.pipeline_parallel_degree == 1 or local_batch_size % size == 0:
            return None
        prefix = "parallelism.pipeline_parallel"
        return Violation(
            (f"{prefix}_microbatch_size", "training.local_batch_size", f"{prefix}_degree"),
            f"must divide local_batch_size ({local_batch_size}), got {size}; try "
            f"local_batch_size = {local_batch_size // size * size or size}",
        )

    def sequence_violation(self, seq_len: int, *, key: str) -> Violation | None:
        """Return the violated rule about sequences that are split over ranks, if any. `key`: the
        setting with their length."""
        cp, balancer = self.context_parallel_degree, self.context_parallel_load_balancer
        chunks = CHUNKS_A_RANK[balancer] if cp > 1 else 1
        tp = self.tensor_parallel_degree if self.enable_sequence_parallel else 1
        multiple = cp * chunks * tp
        if seq_len % multiple == 0:
            return None
        return Violation(
            (key, *(f"parallelism.{tie}" for tie in CUTS_SEQUENCES)),
            f"must be a multiple of {multiple} (context_parallel_degree {cp} x {chunks} chunks per "
            f"rank x tensor_parallel_degree {tp} under sequence parallelism), got {seq_len}; "
            f"try {max(seq_len // multiple, 1) * multiple}",
        )


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Process groups and their timeouts."""

    init_timeout_seconds: PositiveInt = 300
    """Timeout of collectives until the first step of a start is finished."""
    train_timeout_seconds: PositiveInt = 100
    """Timeout of collectives after that."""
    trace_buf_size: NonNegativeInt = 20000
    """Collectives that torch's flight recorder keeps. They are written to save_traces_folder when
    one times out; 0: off."""
    save_traces_folder: LocalPath = "comm_traces"
    """Folder of the flight recorder's files, inside dump_folder."""
    save_traces_file_prefix: str = "rank_"
    """Prefix of the flight recorder's file names."""
