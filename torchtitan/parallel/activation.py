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

A product whose output is only one rank's term of a sum (`wo`, `w2`) is not kept, since under
sequence parallelism it is tp times as large as the part of the sum that this rank keeps. (So `wo`'s
runs again although its sum is kept: one more product per block under tensor parallelism.)

**Collectives** of a recomputed block are repeated, on all ranks alike, but for the sum that "op"
keeps: the gathers along the sequence under tensor parallelism, since to keep their outputs is to
give up what sequence parallelism saves, and the exchanges of Ulysses. Attention over a ring or over
gathered keys is one operator, so with "op" nothing of it is repeated, hops included. FSDP gathers a
block's weights outside of it, as ever once for forward and once for backward.

**Experts.** A router's choice jumps where two scores nearly tie, so it is kept with what else is
decided on the way (`keep_for_recomputation`), and never made again. "op" recomputes attention and
shared experts of a block with experts by operator, the others as a whole, and keeps what lies in
between: the weights of experts are gathered by themselves, and by operator no such collective may
be repeated.

**Random numbers** are the same again: the generators' states are kept at the start of each block.
That is done whether it draws or not, since only afterwards can one tell, and costs 5 KB and 3
microseconds a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.models.interface import AttentionModule, GroupedExperts, MoELayer, RouterModule
from torchtitan.parallel.one_operator import WHOLE_ATTENTION

T = TypeVar("T")
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
    for module in model.modules():
        if isinstance(module, RouterModule):
            module.choose = partial(_choose_once, module.choose)
    whole = partial(checkpoint, use_reentrant=False, context_fn=_contexts)
    by_operator = partial(checkpoint, use_reentrant=False, context_fn=_contexts_by_operator)
    is_by_operator = selects_operators(mode, option)
    every = int(option) if mode == "selective" and option != BY_OPERATOR else 1
    for name, block in model.layers.items():
        if int(name) % every:  # its number in the whole model, whatever the stage
            continue
        if not is_by_operator:
            block.forward = partial(whole, block.forward)
        elif not any(isinstance(module, GroupedExperts) for module in block.modules()):
            block.forward = partial(by_operator, block.forward)
        else:
            for module in block.modules():
                if isinstance(module, GroupedExperts):
                    module.forward = partial(whole, module.forward)
                if isinstance(module, AttentionModule):
                    module.forward = partial(by_operator, module.forward)
                if isinstance(module, MoELayer) and module.shared_experts is not None:
                    shared = module.shared_experts
                    shared.forward = partial(by_operator, shared.forward)


def selects_operators(mode: Mode, option: str) -> bool:
    """Tell whether single operators are kept."""
    return mode == "selective" and option == BY_OPERATOR


_tapes: list[_Tape] = []
"""Of the blocks that run now, to be recomputed or recomputed; the innermost is the last."""


class _Tape(AbstractContextManager[None]):
    """Keeps values while a block runs, or hands them out again, from the first one on."""

    def __init__(self, values: list[Any], *, plays: bool) -> None:
        self._values, self._plays, self._place = values, plays, 0

    def __enter__(self) -> None:
        self._place = 0
        _tapes.append(self)

    def __exit__(self, *error: object) -> None:
        assert _tapes.pop() is self, "blocks that are recomputed end in their order"

    def of(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, or returned when the block first ran."""
        if not self._plays:
            self._values.append(work())
            return self._values[-1]
        self._place += 1
        kept: T = self._values[self._place - 1]
        return kept


def keep_for_recomputation(work: Callable[[], T]) -> T:
    """Return what `work` returns, which needs no gradient; in a recomputed block without doing it
    again."""
    return _tapes[-1].of(work) if _tapes else work()


def _choose_once(choose: Callable[..., Tensor], *scores_and_bias: Tensor | None) -> Tensor:
    return keep_for_recomputation(lambda: choose(*scores_and_bias))


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make what surrounds one run of a block, and what surrounds its recomputation."""
    values: list[Any] = []
    return _Tape(values, plays=False), _Tape(values, plays=True)


def _contexts_by_operator() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The same where some operators' outputs are kept."""
    (run, again), (keep, take) = _contexts(), create_selective_checkpoint_contexts(_Policy())
    return _Together(run, keep), _Together(again, take)


class _Together(AbstractContextManager[None]):
    """Several contexts as one, which may be entered again."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._open = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._open.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


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
            keeps = self._number("product", again) % 2 == 0 and not _is_term(*args[-2:])
        elif name in SUMS:
            keeps = self._number("sum", again) % 2 == 1
        else:
            keeps = name in ATTENTION
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def _number(self, kind: str, again: bool) -> int:
        """Count: 1 is the first of its kind."""
        self._seen[kind, again] += 1
        return self._seen[kind, again]


def _is_term(left: Tensor, right: Tensor) -> bool:
    """Return whether the product of two factors is one rank's term of a sum over ranks."""
    if not isinstance(left, DTensor) or not isinstance(right, DTensor):
        return False
    pairs = zip(left.placements, right.placements, strict=True)
    return any(a.is_shard(1) or b.is_shard(0) or a.is_partial() or b.is_partial() for a, b in pairs)
