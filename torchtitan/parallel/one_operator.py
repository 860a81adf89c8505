"""A whole computation as one operator, for what watches operators one by one.

Selective recomputation keeps or repeats each operator by itself. Attention across ranks consists of
many: messages, which write into their arguments and so can only be repeated, and a kernel for each
piece of the keys, whose results together are larger than the one that counts. Seen from outside as
one operator, its result is kept, and nothing inside runs again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

import torch
from torch import Tensor

Attended = tuple[Tensor, Tensor]
Computation = Callable[[Tensor, Tensor, Tensor], Attended]

# an operator takes tensors and numbers; what it is to compute is handed past it
_COMPUTATION: ContextVar[Computation] = ContextVar("computation")


def compute(q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Attended:
    """Run what the operator stands for, as the operator does."""
    return _COMPUTATION.get()(q_BHSD, k_BKSD, v_BKSD)


_LIBRARY = torch.library.Library("torchtitan", "DEF")
_LIBRARY.define("attention(Tensor q, Tensor k, Tensor v) -> (Tensor out, Tensor lse)")
_LIBRARY.impl("attention", compute, "CompositeExplicitAutograd")

WHOLE_ATTENTION = "torchtitan::attention"
"""The operator's name."""


def as_one_operator(
    computation: Computation, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor
) -> Attended:
    """Return `computation(q, k, v)`, its output and log-sum-exp, out of one operator.

    For use inside an autograd function's forward: the operator has no gradient of its own.
    """
    token = _COMPUTATION.set(computation)
    try:
        return torch.ops.torchtitan.attention(q_BHSD, k_BKSD, v_BKSD)
    finally:
        _COMPUTATION.reset(token)
