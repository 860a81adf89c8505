"""How many bytes an operator reads and writes: what it costs where its arithmetic costs nothing.

An operator's schema says which of its arguments it writes, and which results are views. It does not
say what is read, so three rules are added: an argument for the result is not read, nor is what an
operator only overwrites; and a fused optimizer writes gradients for a gradient scaler alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

WRAPPERS = (DTensor, AsyncCollectiveTensor)
"""Tensors that hold others, and no memory."""
COPIES = ("fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype")
"""What FSDP copies between its buffers and the tensors of a block, in one operator each; the last
is torch 2.15's."""
OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_")
"""Operators that do not read what they write."""
FOR_A_SCALER = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_")
"""Operators that write their gradients only if they are given a gradient scaler's factor."""


def find_leaves(tree: Any) -> Sequence[Any]:
    """Return what the lists and dictionaries of an operator's arguments or results hold."""
    return tree_leaves(tree)


def find_tensors(tree: Any) -> Sequence[Tensor]:
    """Return the tensors of an operator's arguments or results that have memory of their own."""
    return [x for x in find_leaves(tree) if isinstance(x, Tensor) and not isinstance(x, WRAPPERS)]


def is_pass(func: Any) -> bool:
    """Tell whether an operator that sends and multiplies nothing reads or writes memory."""
    if func.namespace != "aten":
        return func.name() in COPIES
    name = func._schema.name.removeprefix("aten::")
    if name == "_unsafe_view" or name.removeprefix("new_").startswith("empty"):
        return False
    # a view, or else memory that something has been written to
    return not any(
        r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
    )


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that an operator writes, by name."""
    given, name = _by_name(func, args, kwargs), func._schema.name.removeprefix("aten::")
    found = {
        argument.name: given.get(argument.name)
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    if name in FOR_A_SCALER and given.get("grad_scale") is None:
        del found["grads"]
    return found


def count_bytes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the bytes that an operator reads and writes."""
    schema, given = func._schema, _by_name(func, args, kwargs)
    changed = written(func, args, kwargs)
    overwrites = schema.name.removeprefix("aten::") in OVERWRITES
    unread = {a.name for a in schema.arguments if a.is_out} | set(changed if overwrites else ())
    read = [value for name, value in given.items() if name not in unread]
    results = (out,) if len(schema.returns) == 1 else out or ()
    # a result with an alias is one of the arguments
    new = [x for r, x in zip(schema.returns, results, strict=True) if r.alias_info is None]
    return sum(t.nbytes for t in find_tensors((read, list(changed.values()), new)))


def _by_name(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
