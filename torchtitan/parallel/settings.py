"""The settings of how blocks compute: [activation_checkpoint], [compile], [quantize]."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.config.schema import GIVEN, Fraction, Requires, Text, named_or_number

KEEPS_A_BUDGET = ("inductor", "aot_eager_decomp_partition")
"""Compilers that choose what to recompute; the second makes no code, and is for tests."""
BUDGET = ("memory_budget",)
BUDGET_REMEDY = "or write mode = full or selective"


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    """Which activations are recomputed in backward instead of kept."""

    mode: Annotated[
        Literal["none", "full", "selective", "memory_budget"],
        Requires("compile.enable", True, BUDGET_REMEDY, of=BUDGET),
        Requires("compile.backend", KEEPS_A_BUDGET, BUDGET_REMEDY, of=BUDGET),
        # torch 2.13 weighs all that a graph takes, and knows no weight for a mesh
        Requires("parallelism.tensor_parallel_degree", 1, BUDGET_REMEDY, of=BUDGET),
    ] = "selective"
    """none: keep all; full: recompute every block; selective: what selective_ac_option says;
    memory_budget: the compiler chooses what of a block to recompute."""
    selective_ac_option: Annotated[str, named_or_number("op")] = "2"
    """A number n in quotes: recompute every n-th block; op: recompute every block but for attention
    and every second matrix product, whose outputs are kept."""
    memory_budget: Annotated[Fraction, Requires("mode", BUDGET, is_notice=True)] = 0.5
    """The part that may be kept of what a compiled block keeps by itself:
    1 recomputes nothing, 0 keeps a block's input, and that of attention which is not compiled."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """torch.compile of the model's blocks."""

    enable: bool = False
    """Compile the blocks: the first step takes minutes, later ones less time."""
    backend: Text = "inductor"
    """Compiler: inductor; to look for faults aot_eager or eager, which make no code."""


FLOAT8_NOTICE = Requires(
    "model.converters", GIVEN, 'write converters = ["float8"], or remove the line', is_notice=True
)
MULTIPLE = 16
"""Float8 products are of sizes that divide by this."""


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """How the linear layers of blocks compute in float8; read with model.converters = float8."""

    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, FLOAT8_NOTICE
    ] = None
    """One scale a tensor (tensorwise, the default), one a row (rowwise), or that with the gradients
    of weights in bfloat16 (rowwise_with_gw_hp)."""
    filter_fqns: tuple[Text, ...] = ()
    """Layers whose name holds one of these stay in bfloat16; the output head always does."""
    emulate: Annotated[bool, FLOAT8_NOTICE] = False
    """Round to float8 and multiply in bfloat16, on any device: slow, for tests."""


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """Linear layers in fewer bits."""

    float8: Float8Config = field(default_factory=Float8Config)
    """Eight bits of floating point."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Layers in fewer bits than the rest of the model."""

    linear: LinearConfig = field(default_factory=LinearConfig)
    """Linear layers."""
