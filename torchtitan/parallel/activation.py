"""Activation checkpointing: recompute in backward what a block computed, instead of keeping it.

It changes memory and time, never a number; blocks keep their type and their parameters their names.

    full             every block is recomputed; kept is the stream between blocks
    selective, "n"   every n-th block is recomputed, the others keep everything
    selective, "op"  every block is recomputed except its costliest operators: they are kept

**By operator.** Kept are the outputs of attention, of every second matrix product and of the first
of a block's two sums over tensor-parallel ranks; norms, rotations, the other products and all that
is elementwise are recomputed. torchtitan keeps the first, third ... product, here it is the second,
fourth ...: recomputation ends with the last tensor that backward needs, the input of a block's last
product, so the seventh of Llama's would be kept for nothing. The same holds for the sum after it.

**Collectives** of a recomputed block are repeated, on all ranks alike, but for the sum that "op"
keeps: the gathers along the sequence under tensor parallelism, since to keep their outputs is to
give up what sequence parallelism saves, and the exchanges of Ulysses. Attention over a ring or over
gathered keys is one operator, so with "op" nothing of it is repeated, hops included. FSDP gathers a
block's weights outside of it, as ever once for forward and once for backward.

**Random numbers** are the same again: the generators' states are kept at the start of each block.
That is done whether it draws or not, since only afterwards can one tell, and costs 5 KB and 3
microseconds a block.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.parallel.one_operator import WHOLE_ATTENTION

Mode = Literal["none", "full", "selective"]
BY_OPERATOR = "op"

# by name: not every one is there in every version, or before its module is imported; and only what
# returns new tensors, for of one that writes into its arguments, as c10d's, the result is elsewhere
ATTENTION = frozenset(
    {
        WHOLE_ATTENTION,
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
    }
)
PRODUCTS = frozenset({"aten::mm", "aten::addmm"})
SUMS = frozenset({"_c10d_functional::reduce_scatter_tensor", "_c10d_functional::all_reduce"})


def apply_activation_checkpointing(model: nn.Module, *, mode: Mode, option: str) -> None:
    """Recompute blocks of `model` in backward, by `option` ("2": every second; "op") if selective.

    A block takes whatever arguments it takes.
    """
    if mode == "none":
        return
    recomputed = partial(checkpoint, use_reentrant=False)
    if selects_operators(mode, option):
        recomputed = partial(recomputed, context_fn=_contexts)
    every = int(option) if mode == "selective" and option != BY_OPERATOR else 1
    for name, block in model.layers.items():
        if int(name) % every == 0:  # its number in the whole model, whatever the stage
            block.forward = partial(recomputed, block.forward)


def selects_operators(mode: Mode, option: str) -> bool:
    """Tell whether single operators are kept."""
    return mode == "selective" and option == BY_OPERATOR


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make what surrounds one run of a block, and what surrounds its recomputation."""
    return create_selective_checkpoint_contexts(_Policy())


class _Policy:
    """Says of each operator of one run of a block, in their order, whether its output is kept."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, bool]] = Counter()

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        # some versions of torch ask again in recomputation
        again = context.is_recompute
        name = operator.name()
        if name in PRODUCTS:
            keeps = self._number("product", again) % 2 == 0
        elif name in SUMS:
            keeps = self._number("sum", again) % 2 == 1
        else:
            keeps = name in ATTENTION
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def _number(self, kind: str, again: bool) -> int:
        """Count: 1 is the first of its kind."""
        self._seen[kind, again] += 1
        return self._seen[kind, again]
