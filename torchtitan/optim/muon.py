"""Muon: updates a matrix by its orthogonalized momentum, equally in every layout.

The update of a matrix is its momentum M = U S V^T with all singular values moved close to 1, about
U V^T, by five steps of a Newton-Schulz iteration (Jordan, kellerjordan.github.io/posts/muon). It is
scaled by 0.2 sqrt(max(rows, columns)), which gives it the size of an AdamW update, so that
learning rate and weight decay of AdamW carry over (arXiv:2502.16982). Embeddings, the output head,
norms and biases are updated by AdamW.

Singular values need the unsharded matrix. Each matrix has one owner among the ranks that hold a
part of it: they send it their parts of the momentum, it orthogonalizes the matrix, and sends every
rank its part of the result. Owners are chosen such that all ranks have about equal work, copies
included, and nothing is computed twice. The alternatives are to gather each matrix on every rank,
which repeats the work, or to orthogonalize each shard by itself, which trains a different model.
Each direction takes one all-to-all for all matrices together. Momentum is sharded like the
parameters, in steps and checkpoints.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import ConfigError
from torchtitan.base.patterns import check_pattern, matches
from torchtitan.models.init import local_offsets, local_part
from torchtitan.optim.clip import SkippingOptimizer
from torchtitan.optim.settings import OptimizerConfig

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of an odd polynomial of degree 5. It is steep at 0, so that few steps suffice, and
leaves singular values between about 0.7 and 1.2 instead of converging to 1."""
NUM_STEPS = 5
EPS = 1e-7


def uses_muon(name: str, parameter: Tensor, settings: OptimizerConfig) -> bool:
    """Return whether Muon updates a parameter: a matrix, or stacked matrices."""
    return parameter.ndim in (2, 3) and not matches(name, settings.muon_excluded_params)


def check_muon(settings: OptimizerConfig, *, trained: Mapping[str, Tensor]) -> None:
    """Check that Muon updates a parameter."""
    for pattern in set(settings.muon_excluded_params) - set(OptimizerConfig.muon_excluded_params):
        check_pattern(pattern, trained, key="optimizer.muon_excluded_params", noun="parameter")
    if not any(uses_muon(name, p, settings) for name, p in trained.items()):
        rule = "must leave Muon a matrix to train, got none"
        raise ConfigError.at("optimizer.muon_excluded_params", rule)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return about U V^T of a matrix U S V^T, or of each matrix of a batch, in its dtype."""
    a, b, c = COEFFICIENTS
    add_product = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=EPS)  # the largest singular value is at most this norm
    for _ in range(NUM_STEPS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def cost(shape: Sequence[int]) -> int:
    """Return the number of multiplications per step of the iteration."""
    short, long = sorted(shape)
    return short * short * (2 * long + short)


def scale(shape: Sequence[int]) -> float:
    """Return the factor that gives an orthogonal matrix the RMS of an AdamW update, about 0.2."""
    return 0.2 * math.sqrt(max(shape))


@dataclass(frozen=True)
class Box:
    """The part of a tensor that a rank holds, per dimension."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Return this part of an unsharded tensor."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            tensor = tensor.narrow(dim, start, size)
        return tensor


@dataclass(frozen=True, eq=False)
class Matrix:
    """A matrix to orthogonalize: a parameter, or one entry of a stacked parameter."""

    name: str
    index: int | None
    """Its index in a stacked parameter."""
    shape: tuple[int, ...]
    parts: Mapping[int, Box]
    """The part that each rank holds. Ranks without a part are missing."""
    owner: int
    """The rank that orthogonalizes it."""
    senders: frozenset[int]
    """The ranks that send the owner their part: one of all ranks with equal parts."""


def find_box(parameter: Tensor) -> Box:
    """Return the part of a parameter that this rank holds."""
    starts, sizes = [], []
    strides = torch.empty(parameter.shape, device="meta").stride()
    for offsets, stride in zip(local_offsets(parameter), strides, strict=True):
        first, last = (int(offsets[i]) // stride if len(offsets) else 0 for i in (0, -1))
        assert last - first + 1 == max(len(offsets), 1), "a part is one block"
        starts.append(first)
        sizes.append(len(offsets))
    return Box(tuple(starts), tuple(sizes))


def plan_work(
    shapes: Mapping[str, Sequence[int]], boxes: Sequence[Mapping[str, Box]]
) -> list[Matrix]:
    """Split parameters into matrices, and choose the owner of each.

    The most expensive matrix is assigned first, to the rank with the least work so far. If some
    ranks hold all of a matrix, its owner is one of them.

    `boxes` has, for each rank, the parts of the parameters that it holds.
    """
    planned: list[Matrix] = []
    work: Counter[int] = Counter()
    matrices = [
        (name, index, tuple(shape[-2:]))
        for name, shape in shapes.items()
        for index in ([None] if len(shape) == 2 else range(shape[0]))
    ]
    for name, index, shape in sorted(matrices, key=lambda matrix: -cost(matrix[2])):
        parts = {
            rank: part
            for rank, boxes_of_rank in enumerate(boxes)
            if (part := _part(boxes_of_rank.get(name), index)) is not None
        }
        whole = [rank for rank, part in parts.items() if part.sizes == shape]
        owner = min(whole or parts, key=lambda rank: (work[rank], rank))
        work[owner] += cost(shape)
        # of ranks with equal parts, the one at the owner's index among its equals sends: it is in
        # the owner's copy of the model, or is the owner
        holders: dict[Box, list[int]] = {}
        for rank in sorted(parts):
            holders.setdefault(parts[rank], []).append(rank)
        number = holders[parts[owner]].index(owner)
        senders = frozenset(ranks[number % len(ranks)] for ranks in holders.values())
        planned.append(Matrix(name, index, shape, parts, owner, senders))
    return planned


def _part(box: Box | None, index: int | None) -> Box | None:
    """Return the part of one matrix that a rank holds, or None if it holds none."""
    if box is None or not box.numel:
        return None
    if index is None:
        return box
    is_here = box.starts[0] <= index < box.starts[0] + box.sizes[0]
    return Box(box.starts[1:], box.sizes[1:]) if is_here else None


def _replace(old: Tensor, new: Tensor, *, skip: Tensor | None) -> None:
    """Copy `new` to `old` unless `skip` is true."""
    if skip is None:
        old.copy_(new)
    else:
        torch.where(skip, old, new, out=old)


class Muon(SkippingOptimizer):
    """Muon over all ranks of the job, with AdamW for all parameters but matrices.

    All ranks must build it and step together. `groups` are those of matrices, or of matrices
    stacked along one dimension, `dtype` is that of the iteration and of communication.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        names: Mapping[Tensor, str],
        adamw: torch.optim.Optimizer,
        lr: float,
        momentum: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        fused = adamw.defaults["fused"]
        super().__init__(
            groups, {"lr": lr, "weight_decay": 0.0, "momentum": momentum, "fused": fused}
        )
        self._groups = list(self.param_groups)
        self._adamw = adamw
        # one list and one state for both, as the schedule and checkpoints see them
        self.param_groups += adamw.param_groups
        self.state = adamw.state
        parameters = {names[p]: p for group in self._groups for p in group["params"]}
        for p in parameters.values():
            self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        self._names = {p: name for name, p in parameters.items()}
        self._boxes = {name: find_box(p) for name, p in parameters.items()}
        self.device = device
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self._rank, ranks = dist.get_rank(), range(dist.get_world_size())
        boxes = [self._boxes for _ in ranks]
        dist.all_gather_object(boxes, self._boxes)
        shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        matrices = plan_work(shapes, boxes)
        self.own = [matrix for matrix in matrices if matrix.owner == self._rank]
        held = [matrix for matrix in matrices if self._rank in matrix.parts]
        sent = [matrix for matrix in matrices if self._rank in matrix.senders]
        self._to_owners = [[m for m in sent if m.owner == rank] for rank in ranks]
        self._from_senders = [[m for m in self.own if rank in m.senders] for rank in ranks]
        self._to_holders = [[m for m in self.own if rank in m.parts] for rank in ranks]
        self._from_owners = [[m for m in held if m.owner == rank] for rank in ranks]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters, or none if `found_inf` is set, without waiting for it."""
        assert closure is None, "the loss is computed once"
        skip = None if self.found_inf is None else self.found_inf.bool()
        moved = self._momenta(skip)
        whole = self._gather(moved)
        for matrix in self.own:
            whole[matrix] = orthogonalize(whole[matrix])
        self._scatter(whole, into=moved)
        for group in self._groups:
            for p in group["params"]:
                if p.grad is not None:
                    local = local_part(p)
                    updated = local * (1 - group["lr"] * group["weight_decay"])
                    updated.add_(moved[self._names[p]], alpha=-group["lr"] * scale(p.shape[-2:]))
                    _replace(local, updated, skip=skip)
        if self.found_inf is not None:
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        self._adamw.step()

    def _momenta(self, skip: Tensor | None) -> dict[str, Tensor]:
        """Update this rank's parts of the momentum, and return Nesterov's momentum."""
        momenta = {}
        for group in self._groups:
            for p in group["params"]:
                if p.grad is None:  # a parameter that the loss does not depend on
                    momentum = torch.zeros_like(local_part(p))
                else:
                    grad, buffer = local_part(p.grad), local_part(self.state[p]["momentum_buffer"])
                    _replace(buffer, buffer.lerp(grad, 1 - group["momentum"]), skip=skip)
                    momentum = grad.lerp(buffer, group["momentum"])
                momenta[self._names[p]] = momentum.to(self._nothing.dtype)
        return momenta

    def _gather(self, momenta: Mapping[str, Tensor]) -> dict[Matrix, Tensor]:
        """Return the unsharded matrices that this rank owns."""
        whole = {matrix: self._nothing.new_empty(matrix.shape) for matrix in self.own}
        sent = [[self._slab(momenta, m) for m in to] for to in self._to_owners]
        received = [[m.parts[rank] for m in of] for rank, of in enumerate(self._from_senders)]
        for matrix, box, part in zip(
            chain.from_iterable(self._from_senders),
            chain.from_iterable(received),
            self._exchange(sent, received),
            strict=True,
        ):
            box.of(whole[matrix]).copy_(part)
        return whole

    def _scatter(self, whole: Mapping[Matrix, Tensor], *, into: Mapping[str, Tensor]) -> None:
        """Send each rank its parts of this rank's matrices, and store the parts received."""
        sent = [
            [m.parts[rank].of(whole[m]) for m in to] for rank, to in enumerate(self._to_holders)
        ]
        received = [[m.parts[self._rank] for m in of] for of in self._from_owners]
        for matrix, part in zip(
            chain.from_iterable(self._from_owners), self._exchange(sent, received), strict=True
        ):
            self._slab(into, matrix).copy_(part)

    def _slab(self, tensors: Mapping[str, Tensor], matrix: Matrix) -> Tensor:
        """Return this rank's part of a matrix, a slice of its part of the parameter."""
        tensor = tensors[matrix.name]
        start = self._boxes[matrix.name].starts[0]
        return tensor if matrix.index is None else tensor[matrix.index - start]

    def _exchange(
        self, sent: Sequence[Sequence[Tensor]], wanted: Sequence[Sequence[Box]]
    ) -> Iterator[Tensor]:
        """Send tensors to each rank and yield the `wanted` parts from each."""
        num_sent = [sum(part.numel() for part in to) for to in sent]
        num_received = [sum(box.numel for box in of) for of in wanted]
        flat = torch.cat([self._nothing, *(part.reshape(-1) for part in chain.from_iterable(sent))])
        received = flat
        if len(sent) > 1:
            received = flat.new_empty(sum(num_received))
            dist.all_to_all_single(received, flat, num_received, num_sent)
        boxes = list(chain.from_iterable(wanted))
        for box, part in zip(boxes, received.split([b.numel for b in boxes]), strict=True):
            yield part.view(box.sizes)
