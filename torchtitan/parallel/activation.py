"""Activation checkpointing: backward recomputes the activations of a block instead of storing them.

It changes memory and time, never a result. Blocks keep their type, and parameters their names.

    full             recompute every block, and keep only the stream between blocks
    selective, "n"   recompute every n-th block, and keep everything in the remaining ones
    selective, "op"  recompute every block except its most expensive operators

**"op"** keeps the outputs of attention, of every second matrix product, and of the first of a
block's two sums over tensor-parallel ranks. It recomputes norms, rotations, the remaining products
and everything elementwise. torchtitan keeps products 1, 3, 5 ... Here it is 2, 4, 6 ..., because
recomputation stops at the last tensor that backward needs, which is the input of a block's last
product. Keeping the output of Llama's seventh product would gain nothing, and the same holds for
the sum after it.

A product that is one rank's term of a sum (`wo`, `w2`) is not kept: under sequence parallelism it
is tp times as large as this rank's part of the sum. (So `wo` is multiplied again although its sum
is kept: one more product per block under tensor parallelism.)

**Collectives** in a recomputed block run again on all ranks, except for the sum that "op" keeps.
This includes the gathers along the sequence, because keeping their outputs would undo what sequence
parallelism saves, and the exchanges of Ulysses. "op" keeps the result of attention over a ring or
over gathered keys, so their messages are not repeated. FSDP gathers a block's weights outside of
the block, once for forward and once for backward as usual.

**Experts.** A router's choice jumps where two scores are nearly equal, so it is recorded together
with everything that depends on it (`keep_for_recomputation`), and never repeated. In a block with
experts, "op" applies to attention and shared experts, recomputes the routed experts completely, and
keeps the tensors in between: FSDP gathers the weights of experts separately, and "op" must not
repeat such a collective.

**Random numbers** are the same in recomputation. The states of the generators are saved at the
start of each block, which costs 5 KB and 3 microseconds per block, because it is not known in
advance whether a block draws random numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from torchtitan.parallel.settings import BY_OPERATOR

T = TypeVar("T")
Mode = Literal["none", "full", "selective"]

# By name, because not every version of torch has all of them. Operators that write into their
# arguments, such as those of c10d, cannot be kept: their result is not their output.
ATTENTION = frozenset(
    {
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
    """Recompute blocks of `model` in backward, in place. `option` is n or "op", for `selective`."""
    if mode == "none":
        return
    for module in model.modules():
        if isinstance(module, RouterModule):
            module.choose = partial(_choose_once, module.choose)
    completely, by_operator = (
        partial(
            checkpoint, use_reentrant=False, context_fn=partial(_contexts, by_operator=by_operator)
        )
        for by_operator in (False, True)
    )
    is_by_operator = mode == "selective" and option == BY_OPERATOR
    interval = int(option) if mode == "selective" and option != BY_OPERATOR else 1
    for name, block in model.layers.items():
        if int(name) % interval:  # the block's number in the full model, in every pipeline stage
            continue
        if not is_by_operator:
            block.forward = partial(completely, block.forward)
        elif not any(isinstance(module, GroupedExperts) for module in block.modules()):
            block.forward = partial(by_operator, block.forward)
        else:
            for module in block.modules():
                if isinstance(module, GroupedExperts):
                    module.forward = partial(completely, module.forward)
                if isinstance(module, AttentionModule):
                    module.forward = partial(by_operator, module.forward)
                if isinstance(module, MoELayer) and module.shared_experts is not None:
                    shared = module.shared_experts
                    shared.forward = partial(by_operator, shared.forward)


_recordings: list[_Recording] = []
"""Recordings of the blocks that are running or being recomputed, innermost last."""


class _Recording(AbstractContextManager[None]):
    """Records values while a block runs, or replays them, from the first one, on recomputation.

    `inner` is entered with it. Both can be entered more than once.
    """

    def __init__(
        self, values: list[Any], *, replays: bool, inner: AbstractContextManager[Any]
    ) -> None:
        self._values, self._replays, self._index, self._inner = values, replays, 0, inner
        self.is_computing = False
        """Whether a value is being computed. Operators inside it are not kept separately."""

    def __enter__(self) -> None:
        self._index = 0
        _recordings.append(self)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        assert _recordings.pop() is self, "recomputed blocks end in order"
        self._inner.__exit__(*error)

    def get(self, compute: Callable[[], T]) -> T:
        """Return `compute()`, or the value that it returned when the block first ran."""
        if not self._replays:
            self.is_computing = True
            try:
                self._values.append(compute())
            finally:
                self.is_computing = False
            return self._values[-1]
        self._index += 1
        value: T = self._values[self._index - 1]
        return value


def keep_for_recomputation(compute: Callable[[], T]) -> T:
    """Return `compute()`, which runs once even if the block is recomputed.

    The result must not require a gradient.
    """
    return _recordings[-1].get(compute) if _recordings else compute()


def _choose_once(choose: Callable[..., Tensor], *scores_and_bias: Tensor | None) -> Tensor:
    return keep_for_recomputation(lambda: choose(*scores_and_bias))


def _contexts(*, by_operator: bool) -> tuple[_Recording, _Recording]:
    """Return the contexts of one run of a block and of its recomputation."""
    values: list[Any] = []
    keep, reuse = (
        create_selective_checkpoint_contexts(OperatorPolicy())
        if by_operator
        else (nullcontext(), nullcontext())
    )
    return (
        _Recording(values, replays=False, inner=keep),
        _Recording(values, replays=True, inner=reuse),
    )


class OperatorPolicy:
    """Decides for each operator of one run of a block, in order, whether its output is kept."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, bool]] = Counter()

    def __call__(
        self, context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        """Return whether the output of the next operator is kept."""
        # some versions of torch ask again in recomputation, so both passes are counted
        again = context.is_recompute
        name = operator.name()
        if _recordings and _recordings[-1].is_computing:
            keeps = False  # the recording keeps the result
        elif name in PRODUCTS:
            keeps = self._count("product", again) % 2 == 0 and not _is_partial(*args[-2:])
        elif name in SUMS:
            keeps = self._count("sum", again) % 2 == 1
        else:
            keeps = name in ATTENTION
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    def _count(self, operator: str, again: bool) -> int:
        """Count an operator. The first of each operator is 1."""
        self._seen[operator, again] += 1
        return self._seen[operator, again]


def _is_partial(left: Tensor, right: Tensor) -> bool:
    """Return whether the product of two factors is one rank's term of a sum over ranks."""
    if not isinstance(left, DTensor) or not isinstance(right, DTensor):
        return False
    pairs = zip(left.placements, right.placements, strict=True)
    return any(a.is_shard(1) or b.is_shard(0) or a.is_partial() or b.is_partial() for a, b in pairs)
