"""Bytes that an operator reads and writes: its cost if it does little arithmetic.

An operator's schema names the arguments that it writes and the results that are views. It does not
describe reads, so three rules are added: an `out` argument is not read, an overwritten argument is
not read, and a fused optimizer writes gradients only for a gradient scaler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

WRAPPERS = (DTensor, AsyncCollectiveTensor)
"""Tensors that wrap other tensors and have no memory."""
COPIES = ("fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype")
"""FSDP's copies between its buffers and the tensors of a block. The last is torch 2.15's."""
OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_")
"""Operators that do not read the argument that they write."""
FOR_A_SCALER = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
"""Operators that write gradients only with a gradient scaler's factor."""


def find_leaves(tree: Any) -> Sequence[Any]:
    """Return the leaves of an operator's arguments or results."""
    return tree_leaves(tree)


def find_tensors(tree: Any) -> Sequence[Tensor]:
    """Return the tensors with memory in an operator's arguments or results."""
    return [x for x in find_leaves(tree) if isinstance(x, Tensor) and not isinstance(x, WRAPPERS)]


def is_pass(func: Any) -> bool:
    """Return whether an operator, neither message nor product, reads or writes memory."""
    if func.namespace != "aten":
        return func.name() in COPIES
    name = func._schema.name.removeprefix("aten::")
    if name == "_unsafe_view" or name.removeprefix("new_").startswith("empty"):
        return False
    # returns a view without a write
    return not any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that an operator writes, by name."""
    arguments, name = _by_name(func, args, kwargs), func._schema.name.removeprefix("aten::")
    operands = {
        argument.name: arguments.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if name in FOR_A_SCALER and arguments.get("grad_scale") is None:
        del operands["grads"]
    return operands


def count_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    schema, arguments = func._schema, _by_name(func, args, kwargs)
    changed = written(func, args, kwargs)
    overwrites = schema.name.removeprefix("aten::") in OVERWRITES
    unread = {a.name for a in schema.arguments if a.is_out} | set(changed if overwrites else ())
    read = [value for name, value in arguments.items() if name not in unread]
    results = (out,) if len(schema.returns) == 1 else out or ()
    # a result with an alias is one of the arguments
    new = [x for r, x in zip(schema.returns, results, strict=True) if r.alias_info is None]
    return sum(t.nbytes for t in find_tensors((read, list(changed.values()), new)))


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
