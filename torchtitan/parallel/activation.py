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
sequence parallelism it is tp times as large as the part of the sum that this rank keeps. Nor is it
computed again where its sum is kept: nothing else reads it, so empty memory stands for it until the
kept sum replaces that.

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from torchtitan.base.dispatch import DispatchMode
from torchtitan.models.contract import Attends
from torchtitan.models.routing import ChoosesExperts, Routes, StackedExperts
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
        if isinstance(module, ChoosesExperts):
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
        elif not any(isinstance(module, StackedExperts) for module in block.modules()):
            block.forward = partial(by_operator, block.forward)
        else:
            for module in block.modules():
                if isinstance(module, StackedExperts):
                    module.forward = partial(whole, module.forward)
                if isinstance(module, Attends):
                    module.forward = partial(by_operator, module.forward)
                if isinstance(module, Routes) and module.shared_experts is not None:
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
    policy = _Policy()
    (run, again), (keep, take) = _contexts(), create_selective_checkpoint_contexts(policy)
    # outside of what hands out kept outputs: it sees the operators that run again
    return _Together(run, keep), _Together(again, _SkipTerms(policy.stand_ins), take)


class _Together(AbstractContextManager[None]):
    """Several contexts as one, which may be entered again."""

    def __init__(self, *contexts: AbstractContextManager[Any]) -> None:
        self._contexts, self._open = contexts, ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._open.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


StandIn = Callable[[DTensor], DTensor]
"""Makes what stands for a product, from the product's first factor."""


class _Policy:
    """Says of each operator of one run of a block, in their order, whether its output is kept."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, bool]] = Counter()
        self._terms: set[int] = set()  # products, by number, that are terms of sums over ranks
        self._last_term: tuple[int, int, StandIn] | None = None
        self.stand_ins: list[StandIn | None] = []
        """What stands for each product that is not kept; None: it runs again."""

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        # some versions of torch ask again in recomputation
        again = context.is_recompute
        name = operator.name()
        if name in PRODUCTS:
            number = self._number("product", again)
            if not again:
                if hasattr(context, "op_output"):
                    self._note_product(number, context.op_output)
                else:  # torch 2.11
                    self._note_product(number, _stand_for_output(*args[-2:]))
            keeps = self._keeps_product(number)
        elif name in SUMS:
            keeps = self._number("sum", again) % 2 == 1
            if not again:
                self._note_sum(args[0].numel(), keeps=keeps)
        else:
            keeps = name in ATTENTION
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def _number(self, kind: str, again: bool) -> int:
        """Count: 1 is the first of its kind."""
        self._seen[kind, again] += 1
        return self._seen[kind, again]

    def _keeps_product(self, number: int) -> bool:
        return number % 2 == 0 and number not in self._terms

    def _note_product(self, number: int, output: Tensor) -> None:
        if isinstance(output, DTensor) and any(p.is_partial() for p in output.placements):
            self._terms.add(number)
            shape = output.to_local().shape
            make = partial(_stand_in, shape=shape, placements=output.placements)
            self._last_term = len(self.stand_ins), shape.numel(), make
        if not self._keeps_product(number):
            self.stand_ins.append(None)

    def _note_sum(self, size: int, *, keeps: bool) -> None:
        """If a sum is kept, let the product that went into it be left out."""
        if keeps and self._last_term is not None and self._last_term[1] == size:
            self.stand_ins[self._last_term[0]] = self._last_term[2]
        self._last_term = None


def _stand_for_output(left: Tensor, right: Tensor) -> Tensor:
    """Return what is laid out as the product of two factors, written to by nothing."""
    if not isinstance(left, DTensor) or not isinstance(right, DTensor):
        return left
    pairs = zip(left.placements, right.placements, strict=True)
    placements = [
        Partial() if a.is_shard(1) or b.is_shard(0) else b if b.is_shard(1) else a for a, b in pairs
    ]
    shape = left.to_local().shape[0], right.to_local().shape[1]
    local = left.to_local().new_empty(shape)
    return DTensor.from_local(local, left.device_mesh, placements, run_check=False)


def _stand_in(left: DTensor, *, shape: torch.Size, placements: Sequence[Placement]) -> DTensor:
    """Return memory that nothing was written to, in the place of a product."""
    empty = left.to_local().new_empty(shape)
    return DTensor.from_local(empty, left.device_mesh, placements, run_check=False)


class _SkipTerms(DispatchMode):
    """Leaves out products of which a kept sum was made; it sees those that would run again."""

    def __init__(self, stand_ins: Sequence[StandIn | None]) -> None:
        super().__init__()
        self._stand_ins, self._place = stand_ins, 0

    def __enter__(self) -> Any:
        self._place = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in PRODUCTS:
            make = self._stand_ins[self._place]
            self._place += 1
            if make is not None:
                return make(args[-2])
        return func(*args, **(kwargs or {}))
