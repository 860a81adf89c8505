"""Rules of float8: what it is known to go with."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.config.broken import Broken
from torchtitan.config.layers import literal
from torchtitan.job import Config
from torchtitan.parallel.settings import FLOAT8, MULTIPLE, Float8Config


def float8_rules(config: Config) -> Iterator[Broken]:
    """Check what goes with model.converters."""
    key, converters = "model.converters", config.model.converters
    if not converters:
        yield from _unread(config.quantize.linear.float8)
        return
    others = [name for name in converters if name not in FLOAT8]
    if others:
        yield Broken(
            (key,),
            f'supports only "float8", got {", ".join(others)}; write float8 or remove the line',
        )
        return
    training, parallelism = config.training, config.parallelism
    if training.mixed_precision_param == "float32":
        yield Broken(
            (key, "training.mixed_precision_param"),
            "computes in bfloat16 between the products in float8, got mixed_precision_param = "
            '"float32"; write "bfloat16" or "auto"',
        )
    if training.dtype != "float32":
        yield Broken(
            (key, "training.dtype"),
            f'keeps float32 weights, got dtype = "{training.dtype}"; write "float32"',
        )
    if config.lora.rank:
        yield Broken(
            (key, "lora.rank"),
            f"converts whole layers, got lora.rank = {config.lora.rank}, which adds factors to "
            "them; write rank = 0, or train in bfloat16",
        )
    yield from _tokens(config)
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        if getattr(parallelism, name) > 1:
            yield Broken(
                (key, f"parallelism.{name}"),
                f"float8 has not been built for {name} above 1; write 1, or train in bfloat16",
            )


def _unread(settings: Float8Config) -> Iterator[Broken]:
    """Tell of what asks for float8 where nothing is converted.

    filter_fqns, which asks for less of it, stands in torchtitan's files without converters.
    """
    for name in ("recipe_name", "emulate"):
        value = getattr(settings, name)
        if value:
            yield Broken(
                (f"quantize.linear.float8.{name}", "model.converters"),
                f"has no effect: it is read with float8 alone, got {literal(value)} and converters "
                '= []; write converters = ["float8"], or remove the line',
                is_notice=True,
            )


def _tokens(config: Config) -> Iterator[Broken]:
    """Check what the gradient of a weight adds up over: the tokens of a product."""
    training, cp = config.training, config.parallelism.context_parallel_degree
    num_tokens = training.local_batch_size * training.seq_len // cp
    if num_tokens % MULTIPLE and not config.quantize.linear.float8.emulate:
        yield Broken(
            (
                "model.converters",
                "training.local_batch_size",
                "training.seq_len",
                "parallelism.context_parallel_degree",
            ),
            f"multiplies tokens by the {MULTIPLE}, got {num_tokens} at once on a rank "
            f"(local_batch_size x seq_len / context_parallel_degree); try seq_len = "
            f"{max(training.seq_len // (MULTIPLE * cp), 1) * MULTIPLE * cp}",
        )
