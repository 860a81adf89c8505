"""Rules of the layout, as far as they need no number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torchtitan.base.errors import did_you_mean
from torchtitan.config.broken import Broken
from torchtitan.job import Config
from torchtitan.mesh.settings import CHUNKS_A_RANK, ParallelismConfig

SEQUENCE_TIES = (
    "parallelism.context_parallel_degree",
    "parallelism.context_parallel_load_balancer",
    "parallelism.tensor_parallel_degree",
    "parallelism.enable_sequence_parallel",
)
"""Settings that cut sequences."""

RESHARDS = ("default", "always", "never")


def layout_rules(config: Config) -> Iterator[Broken]:
    """Check degrees, pipeline and sequence."""
    yield from _degrees(config)
    yield from _reshard(config)
    yield from _pipeline(config)
    yield from _sequence(config)


def _degrees(config: Config) -> Iterator[Broken]:
    degree = config.parallelism.data_parallel_shard_degree
    if degree != -1 and degree < 1:
        yield Broken(
            ("parallelism.data_parallel_shard_degree",),
            f"must be -1 (all ranks left over) or at least 1, got {degree}",
        )


def _reshard(config: Config) -> Iterator[Broken]:
    key, asked = (
        "parallelism.fsdp_reshard_after_forward",
        config.parallelism.fsdp_reshard_after_forward,
    )
    if asked in RESHARDS:
        return
    if not (asked.isascii() and asked.isdecimal()):
        choices = ", ".join(f'"{name}"' for name in RESHARDS)
        guess = did_you_mean(asked, RESHARDS)
        yield Broken((key,), f'must be {choices} or a number of ranks, got "{asked}"{guess}')


def _pipeline(config: Config) -> Iterator[Broken]:
    """Hold batch, microbatches and stages of a pipeline together, where there is one."""
    parallelism, local = config.parallelism, config.training.local_batch_size
    if parallelism.pipeline_parallel_degree == 1:
        return
    size = parallelism.pipeline_parallel_microbatch_size
    number = parallelism.pipeline_parallel_num_microbatches
    layers = parallelism.pipeline_parallel_layers_per_stage
    prefix = "parallelism.pipeline_parallel_"
    keys = (f"{prefix}num_microbatches", f"{prefix}microbatch_size")
    ties = ("training.local_batch_size", f"{prefix}degree")
    if number is not None and size not in (1, local // number):
        yield Broken(
            keys,
            f"is another way to say microbatch_size, but both are given: {number} microbatches of "
            f"local_batch_size {local}, and microbatch_size {size}; remove one of them",
        )
    elif number is not None and local % number:
        fits = [str(n) for n in range(1, local + 1) if local % n == 0]
        yield Broken(
            (keys[0], *ties),
            f"must divide local_batch_size ({local}), got {number}; try {', '.join(fits)}",
        )
    elif number is None and local % size:
        yield Broken(
            (keys[1], *ties),
            f"must divide local_batch_size ({local}), got {size}; try local_batch_size = "
            f"{local // size * size or size}, or set num_microbatches",
        )
    if parallelism.module_fqns_per_model_part and layers is not None:
        yield Broken(
            ("parallelism.module_fqns_per_model_part", f"{prefix}layers_per_stage"),
            f"lists the stages, but layers_per_stage = {layers} asks for others; remove one",
        )


def _sequence(config: Config) -> Iterator[Broken]:
    parallelism = config.parallelism
    balancer, method = (
        parallelism.context_parallel_load_balancer,
        parallelism.context_parallel_rotate_method,
    )
    if parallelism.context_parallel_degree == 1:
        return
    if balancer == "balanced" and method == "ulysses":
        yield Broken(
            (
                "parallelism.context_parallel_load_balancer",
                "parallelism.context_parallel_rotate_method",
            ),
            'is for "ring" and "allgather": under "ulysses" every rank attends over the whole '
            'sequence with its own heads, so all work alike; write "headtail" or "none"',
        )
    if rule := misfit(config.training.seq_len, parallelism=parallelism):
        yield Broken(("training.seq_len", *SEQUENCE_TIES), rule)


def misfit(seq_len: int, *, parallelism: ParallelismConfig) -> str | None:
    """Say what a sequence that is cut for several ranks must be a multiple of, if it is not."""
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    factors = [(cp, f"context_parallel_degree {cp}")] if cp > 1 else []
    chunks = CHUNKS_A_RANK[parallelism.context_parallel_load_balancer]
    if cp > 1 and chunks > 1:
        balancer = parallelism.context_parallel_load_balancer
        factors.append((chunks, f"{chunks} chunks a rank under {balancer}"))
    if tp > 1 and parallelism.enable_sequence_parallel:
        factors.append((tp, f"tensor_parallel_degree {tp} under sequence parallelism"))
    parts = prod(factor for factor, _ in factors)
    if seq_len % parts == 0:
        return None
    product = " x ".join(name for _, name in factors)
    return (
        f"seq_len must be a multiple of {parts} ({product}), got {seq_len}; "
        f"try {max(seq_len // parts, 1) * parts}"
    )
