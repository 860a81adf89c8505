"""Settings of activation checkpointing, compilation and float8.

Sections [activation_checkpoint], [compile] and [quantize].
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from torchtitan.base.custom import is_import_path
from torchtitan.config.settings import SET, Fraction, NameOrNumber, Requires, Rule, Text

KEEPS_A_BUDGET = ("inductor", "aot_eager_decomp_partition")
"""Compilers that support a memory budget. The second generates no code and is for tests."""
BY_OPERATOR = "op"
"""selective_ac_option that keeps the outputs of single operators."""
BUDGET = ("memory_budget",)
WITH_BLOCKS = ("model",), ("model", "loss"), ("loss", "model")
"""compile.components that compile the blocks."""
NOT_CUSTOM = Rule("of this package", lambda loss: not is_import_path(loss))
BUDGET_REMEDY = "or write mode = full or selective"


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointConfig:
    """Activations that backward recomputes instead of storing them."""

    mode: Annotated[
        Literal["none", "full", "selective", "memory_budget"],
        Requires("compile.enable", True, BUDGET_REMEDY, of=BUDGET),
        Requires("compile.backend", KEEPS_A_BUDGET, BUDGET_REMEDY, of=BUDGET),
        Requires("compile.components", WITH_BLOCKS, BUDGET_REMEDY, of=BUDGET),
        # torch 2.13 weighs every input of a graph, and cannot weigh a DeviceMesh
        Requires("parallelism.tensor_parallel_degree", 1, BUDGET_REMEDY, of=BUDGET),
    ] = "selective"
    """none: keep all; full: recompute every block; selective: see selective_ac_option, and none
    under zero-bubble schedules; memory_budget: the compiler chooses what to recompute."""
    selective_ac_option: Annotated[str, NameOrNumber(BY_OPERATOR)] = "2"
    """A number n in quotes: recompute every n-th block; op: recompute every block except attention
    and every second matrix product, whose outputs are kept."""
    memory_budget: Annotated[Fraction, Requires("mode", BUDGET, is_notice=True)] = 0.5
    """Fraction of a compiled block's activations to keep:
    1 recomputes nothing, 0 keeps the inputs of blocks and of uncompiled attention."""


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """torch.compile of the model's blocks and of the loss."""

    enable: bool = False
    """Compile: the first step takes minutes, later steps are faster."""
    components: Annotated[
        tuple[Literal["model", "loss"], ...],
        Rule("not empty", bool),
        Requires("training.loss", NOT_CUSTOM, of=(("loss",),)),
    ] = ("model", "loss")
    """The compiled parts: the model's blocks, and the passes of the loss over the logits."""
    backend: Text = "inductor"
    """Compiler: inductor; for debugging aot_eager or eager, which generate no code."""

    @property
    def blocks(self) -> bool:
        """Whether the model's blocks are compiled."""
        return self.enable and "model" in self.components

    @property
    def loss_backend(self) -> str | None:
        """The compiler of the loss, if any."""
        return self.backend if self.enable and "loss" in self.components else None


FLOAT8_NOTICE = Requires(
    "model.converters", SET, 'write converters = ["float8"], or remove the line', is_notice=True
)
MULTIPLE = 16
"""Sizes of float8 products must be a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class Float8Config:
    """Float8 linear layers of blocks, with model.converters = float8."""

    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, FLOAT8_NOTICE
    ] = None
    """One scale per tensor (tensorwise, the default), one per row (rowwise), or one per row and the
    gradients of weights in bfloat16 (rowwise_with_gw_hp)."""
    filter_fqns: tuple[Text, ...] = ()
    """Layers whose name contains one of these stay in bfloat16; the output head always does."""
    emulate: Annotated[bool, FLOAT8_NOTICE] = False
    """Round to float8 and multiply in bfloat16, on any device: slow, for tests."""


@dataclass(frozen=True, kw_only=True)
class LinearConfig:
    """Quantization of linear layers."""

    float8: Float8Config = field(default_factory=Float8Config)
    """Eight-bit floating point."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Layers with fewer bits than the rest of the model."""

    linear: LinearConfig = field(default_factory=LinearConfig)
    """Linear layers."""
