"""A record of the memory, messages and arithmetic of a step, in order.

The tape is a dispatch mode. Below autograd, FSDP and DTensor it sees each operator of one rank, on
real or fake tensors. The results of operators show when a storage is born, and a finalizer reports
its death. The alternatives are formulas, which would repeat the trainer's rules by hand, and a
profiler, which needs the planned machine.

The tape is cut into *pieces*. Each lasts from the start of a block's forward or backward to the
start of the next one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from torchtitan.tools.plan.passes import (
    WRAPPERS,
    count_bytes,
    find_leaves,
    find_tensors,
    is_pass,
)

Purpose = Literal[
    "weights",
    "optimizer",
    "gradients",
    "gathered weights",
    "activations",
    "logits",
    "communication",
    "temporaries",
]
"""Purpose of a storage."""
Pool = Literal["compute", "gather", "reduce", "host"]
"""Stream whose memory holds a storage; the allocator does not share it between streams. `host` is
the host's memory, for offloaded storages."""
Phase = Literal["state", "forward", "backward", "between", "update", "validation"]
"""Between forwards and backwards, a pipeline gathers and frees the weights of its blocks."""
MESSAGES = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of operators that communicate."""
UNREGISTERED = ("flash_attention_for_cpu", "_grouped_mm")
"""Products without a formula in torch's registry of FLOPs."""
WITH_WIDE_SUMS = torch.ops.aten.bmm.dtype
"""A product of `models/moe.py`: of rows with one vector each, its cost is that of reading them."""
WORLD = "world"
"""The axis of all ranks of the job."""


class Entry(NamedTuple):
    """An event of the tape. Names of modules are relative to their block."""

    event: Literal["birth", "death", "message", "product", "pass"]
    """A pass is an operator that is bound by memory."""
    size: int
    """Bytes, or floating-point operations of a product."""
    where: tuple[str, ...]
    """Birth, pass: operator, module. Message: axis, collective, module. Product: operator, module,
    shapes of the factors."""
    purpose: Purpose = "temporaries"
    pool: Pool = "compute"
    born: int = -1
    """For a death: index of the birth."""


class Piece(NamedTuple):
    """Entries from `start` to the next piece, of a block's forward or backward, or outside of
    blocks."""

    start: int
    phase: Phase | None
    block: int | None


@dataclass
class Record:
    """The contents of a tape, to be replayed or counted."""

    entries: list[Entry] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=lambda: [Piece(0, None, None)])

    def bounds(self) -> Iterator[tuple[Piece, int]]:
        """Yield each piece and the index of its end."""
        ends = [piece.start for piece in self.pieces[1:]] + [len(self.entries)]
        yield from zip(self.pieces, ends, strict=True)

    def of_phase(self, phase: Phase) -> list[Entry]:
        """Return the entries of a phase."""
        pieces = ((p.start, end) for p, end in self.bounds() if p.phase == phase)
        return [entry for start, end in pieces for entry in self.entries[start:end]]


class Tape(TorchDispatchMode):
    """Records the operators of this process while it is entered.

    `axes` has the axes of each process group, by the group's name, with the axes of FSDP last.
    """

    def __init__(self, axes: Mapping[str, Sequence[str]]) -> None:
        super().__init__()
        self.record = Record()
        self.is_validating = False
        self.pool: Pool = "compute"
        self.purpose: Purpose = "temporaries"
        self.is_paused = False
        self.is_sharding = False
        """Whether FSDP's code runs."""
        self._axes = axes
        self._live: dict[int, tuple[int, int]] = {}
        """Size and birth of each storage."""
        self._modules: list[str] = [""]
        self._block_of: dict[nn.Module, int] = {}
        self._backward = -1

    def copy_record(self) -> Record:
        """Return a copy of the record so far, without later deaths."""
        return Record(list(self.record.entries), list(self.record.pieces))

    def mark(self, phase: Phase | None, block: int | None) -> None:
        """Start a piece."""
        if self.is_validating:
            phase = "validation"
        piece = Piece(len(self.record.entries), phase, block)
        if self.record.pieces[-1][1:] != piece[1:]:
            self.record.pieces.append(piece)

    def hold(self, tensor: Tensor, *, purpose: Purpose, pool: Pool = "compute") -> None:
        """Record an existing tensor. A tensor that was seen before keeps its birth."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            self.name(tensor, purpose=purpose, pool=pool)
        else:
            self.bear(storage, Entry("birth", storage.nbytes(), ("state", ""), purpose, pool))

    def name(self, tensor: Tensor, *, purpose: Purpose, pool: Pool | None = None) -> None:
        """Set the purpose, and the stream, of a live storage after its birth."""
        live_entry = self._live.get(tensor.untyped_storage()._cdata)
        if live_entry is not None and live_entry[1] >= 0:
            entry = self.record.entries[live_entry[1]]
            self.record.entries[live_entry[1]] = entry._replace(
                purpose=purpose, pool=pool or entry.pool
            )

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """Record a change of a storage's size."""
        if self._live.get(storage._cdata, (0, -1))[0] != size:
            where = ("resize", self._modules[-1])
            self.bear(storage, Entry("birth", size, where, "gathered weights", self.pool))

    def watch_blocks(self, model: nn.Module) -> None:
        """Start pieces at blocks of `model`, and record the names of modules."""
        blocks = {block: int(name) for name, block in model.layers.items()}  # type: ignore[operator]
        prefixes = {block: name for name, block in model.named_modules() if block in blocks}
        for name, module in model.named_modules():
            owner = next((p for p in prefixes.values() if name.startswith(f"{p}.")), "")
            own = name.removeprefix(f"{owner}.") if owner else name
            label = "" if module in blocks else own
            module.register_forward_pre_hook(lambda *_, label=label: self._modules.append(label))
            module.register_forward_hook(lambda *_: self._leave(), always_call=True)
        for block, number in blocks.items():
            self._block_of |= dict.fromkeys(block.modules(), number)
            block.register_forward_pre_hook(lambda *_, n=number: self._enter_block(n), prepend=True)
            block.register_forward_hook(lambda _, __, out, n=number: self._await_gradient(out, n))
        model.register_forward_hook(lambda *_: self._enter_block(None))
        ends = [getattr(model, name) for name in ("norm", "output")]
        for module in [end for end in ends if end is not None]:
            module.register_forward_pre_hook(lambda *_: self._enter_block(None), prepend=True)

    def _leave(self) -> None:
        if len(self._modules) > 1:
            self._modules.pop()

    def _enter_block(self, number: int | None) -> None:
        if torch._C._current_graph_task_id() == -1:  # in backward, blocks are recomputed
            self.mark("forward" if number is not None else None, number)

    def mark_between(self, modules: Sequence[nn.Module]) -> None:
        """Start the piece of the block that has `modules`, unless a block computes."""
        if self.record.pieces[-1].phase in (None, "between"):
            block = self._block_of.get(modules[0])
            self.mark(None if block is None else "between", block)

    def _await_gradient(self, out: Tensor, number: int) -> None:
        if out.requires_grad:
            out.register_hook(lambda _: self._enter_backward(number))

    def _enter_backward(self, number: int) -> None:
        self.mark("backward", number)
        if self._backward != (task := torch._C._current_graph_task_id()):
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self.mark(None, None))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(tensor_type, WRAPPERS) for tensor_type in types):
            return NotImplemented  # dispatched again with the wrapped tensors
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops._c10d_functional.wait_tensor.default:
            out = args[0]  # as with real tensors; with fake ones it returns a new tensor
        if not self.is_paused:
            self._note(func, args, kwargs, out)
        return out

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.name()
        is_message = func.namespace in MESSAGES
        purpose: Purpose = "communication" if is_message else self.purpose
        for tensor in find_tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._live:
                where = (name, self._modules[-1])
                self.bear(storage, Entry("birth", storage.nbytes(), where, purpose, self.pool))
        if is_message:
            if "wait_tensor" not in name and "wrap_tensor" not in name:
                self._note_message(name, args, out)
        elif not (func is WITH_WIDE_SUMS and out.shape[-1] == 1) and (
            func._overloadpacket in flop_registry or any(part in name for part in UNREGISTERED)
        ):
            self._note_product(func, args, kwargs, out)
        elif is_pass(func) and (size := count_bytes(func, args, kwargs, out)):
            self._append(Entry("pass", size, (name, self._modules[-1])))

    def _note_message(self, name: str, args: Any, out: Any) -> None:
        boxes = [x for x in find_leaves(args) if "ProcessGroup" in str(getattr(x, "_type", str)())]
        names = [x for x in find_leaves(args) if isinstance(x, str) and x in self._axes]
        group = dist.ProcessGroup.unbox(boxes[0]).group_name if boxes else names[-1]
        # the larger side is unsharded
        sides = [sum(t.nbytes for t in find_tensors(x)) for x in (*args, out)]
        short = name.split("::")[1].split(".")[0].strip("_")
        axis = self._axes[group][-1 if self.is_sharding else 0]
        if self.record.pieces[-1].phase == "update" and WORLD in self._axes[group]:
            axis = WORLD  # the gradient norm
        self._append(Entry("message", max(sides), (axis, short, self._modules[-1])))

    def _note_product(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func.name()
        shapes = " ".join("x".join(map(str, t.shape)) for t in find_tensors(args) if t.ndim > 1)
        if "flash_attention_for_cpu" in name:
            is_backward = "backward" in name
            q, k = args[1:3] if is_backward else args[:2]
            num_products, num_inputs = (5, 7) if is_backward else (2, 4)
            is_causal = (
                args[num_inputs] if len(args) > num_inputs else kwargs.get("is_causal", False)
            )
            # causal: half of the scores
            flops = num_products * q.numel() * k.shape[2] * (1 if is_causal else 2)
        elif "_grouped_mm" in name:  # each row of all groups once, or each column in a gradient
            flops = 2 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
        else:
            operands = [x for x in args if not isinstance(x, torch.dtype)]  # formulas take no dtype
            flops = flop_registry[func._overloadpacket](*operands, **kwargs, out_val=out)
        self._append(Entry("product", int(flops), (name, self._modules[-1], shapes)))

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Record a product of two matrices that adds to a third."""
        shapes = " ".join("x".join(map(str, factor.shape)) for factor in (left, right))
        flops = 2 * left.numel() * right.shape[1]
        self._append(Entry("product", flops, (name, self._modules[-1], shapes)))

    def bear(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """Record the birth of a storage, and later its death. A resized one dies first."""
        key = storage._cdata
        if key in self._live:
            self._die(key)
        else:
            weakref.finalize(storage, self._drop, key)
        self._live[key] = entry.size, len(self.record.entries) if entry.size else -1
        if entry.size:
            self._append(entry)

    def _drop(self, key: int) -> None:
        self._die(key)
        del self._live[key]

    def _die(self, key: int) -> None:
        size, birth = self._live[key]
        if size:
            entry = self.record.entries[birth]
            self._append(entry._replace(event="death", born=birth))

    def _append(self, entry: Entry) -> None:
        self.record.entries.append(entry)

    @contextmanager
    def within(self, **values: Any) -> Iterator[None]:
        """Set `pool`, `purpose`, `is_paused` or `is_sharding` for the time of the context."""
        before = {name: getattr(self, name) for name in values}
        for name, value in values.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)
