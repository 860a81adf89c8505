"""Rules of what is done to a block of the model: recomputed, compiled, or both."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.config.broken import Broken
from torchtitan.job import Config
from torchtitan.parallel.settings import ActivationCheckpointConfig

KEEPS_A_BUDGET = ("inductor", "aot_eager_decomp_partition")
"""Compilers that choose what to recompute; the second makes no code, and is for tests."""


def block_rules(config: Config) -> Iterator[Broken]:
    """Check how recomputation and the compiler go together."""
    option = config.activation_checkpoint.selective_ac_option
    is_number = option.isdecimal() and option.isascii() and 0 < len(option.lstrip("0")) < 10
    if not (is_number or option == "op"):
        yield Broken(
            ("activation_checkpoint.selective_ac_option",),
            f'must be "op" or a positive integer in quotes, as "2" for every second block, got '
            f'"{option}"',
        )
    settings, mode = config.compile, config.activation_checkpoint.mode
    budget = config.activation_checkpoint.memory_budget
    if mode != "memory_budget" and budget != ActivationCheckpointConfig().memory_budget:
        yield Broken(
            ("activation_checkpoint.memory_budget", "activation_checkpoint.mode"),
            f'has no effect: it is read only with mode = "memory_budget", got mode = "{mode}"',
            is_notice=True,
        )
    if mode == "memory_budget" and not settings.enable:
        yield Broken(
            ("activation_checkpoint.mode", "compile.enable"),
            "needs compile.enable = true, for it is the compiler that chooses what to recompute; "
            "without it write full or selective",
        )
    elif mode == "memory_budget" and settings.backend not in KEEPS_A_BUDGET:
        yield Broken(
            ("activation_checkpoint.mode", "compile.backend"),
            f'needs compile.backend = "inductor", got "{settings.backend}", which recomputes '
            f"nothing; or write full or selective",
        )
    elif mode == "memory_budget" and config.parallelism.tensor_parallel_degree > 1:
        # torch 2.13 weighs all that a graph takes, and knows no weight for a mesh
        yield Broken(
            ("activation_checkpoint.mode", "parallelism.tensor_parallel_degree"),
            "is not known to the compiler under tensor parallelism; write full or selective",
        )
    if settings.enable and mode == "selective" and option == "op":
        yield Broken(
            ("activation_checkpoint.selective_ac_option", "compile.enable"),
            "chooses operators one by one, and a compiled block is one operator; write "
            '"2" for every second block, or compile.enable = false',
        )
