"""Rules of float8: what it is known to go with."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.config.broken import Broken
from torchtitan.config.float8 import FLOAT8
from torchtitan.config.schema import Config


def float8_rules(config: Config) -> Iterator[Broken]:
    """Check what goes with model.converters."""
    key, converters = "model.converters", config.model.converters
    if not converters:
        return
    others = [name for name in converters if name not in FLOAT8]
    if others:
        yield Broken(
            (key,),
            f'knows "float8" alone, got {", ".join(others)}; write float8 or remove the line',
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
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        if getattr(parallelism, name) > 1:
            yield Broken(
                (key, f"parallelism.{name}"),
                f"float8 has not been built for {name} above 1; write 1, or train in bfloat16",
            )
