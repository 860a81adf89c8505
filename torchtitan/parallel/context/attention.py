"""Causal attention over sequences that are split across ranks, in three ways.

    all-gather  every rank gets all keys and values at once; simple and fastest on fast links, but
                it holds the keys and values of the whole sequence
    ring        they pass from rank to rank, the next ones while the current ones are used
                (arXiv:2310.01889); memory is that of a rank's own part
    ulysses     one exchange turns parts of the sequence into parts of the heads, each rank attends
                over the whole sequence with its heads, and a second exchange turns back
                (arXiv:2309.14509); needs enough heads

The first two are one autograd function, which visits the keys of every rank and differs only in how
they arrive and how their gradients return. Keys and values are sent with their own heads, in their
own dtype, as one message; gradients are summed and sent in float32.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, D head width, N ranks; 2
stands for keys and values.

Attention of a block of queries to a block of keys, and how two such results become one.

Softmax over keys that come in pieces needs, beside each piece's output, the logarithm of its sum of
exponentials: then pieces are merged exactly, in any order (arXiv:2205.14135). PyTorch's public
attention keeps that number to itself, the operators below it return it: one for each kind of device
and dtype. Backward takes the *merged* output and log-sum-exp, so that a piece's gradients are right
without the other pieces. No kernel holds a matrix of scores, nor takes a mask.

Measured on CPU alone. The two CUDA kernels follow PyTorch's declarations and have not been run; the
one for 16 bits needs a head width that is a multiple of 8.

Shapes: B batch, H query heads, K key/value heads, S queries, T keys, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from torchtitan.models.attention import causal_attention
from torchtitan.models.interface import Attend, Documents
from torchtitan.parallel.context.layout import Block, SequenceLayout, find_blocks
from torchtitan.parallel.one_operator import as_one_operator

Method = Literal["allgather", "ring", "alltoall", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that share a sequence, and how they share it."""

    group: dist.ProcessGroup
    layout: SequenceLayout

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self.group)

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.layout.degree

    def blocks(self, source: int, *, num_tokens: int, documents: Documents | None) -> list[Block]:
        """Return what this rank's queries, so many, attend to among the keys of another."""
        seq_len = num_tokens * self.degree
        return find_blocks(self.layout, self.rank, source, seq_len, documents)


class KVTransport(Protocol):
    """Brings the keys and values of all ranks here, and returns their gradients."""

    def visit(self, kv_2BKSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank's number, this one's first, with its keys and values."""
        ...

    def add(self, source: int, grad_2BKSD: Tensor) -> None:
        """Take the gradient of what `visit` has yielded last, float32."""
        ...

    def total(self) -> Tensor:
        """Return the gradient of this rank's own keys and values, by all ranks."""
        ...


class Gather:
    """Brings everything at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._grads: dict[int, Tensor] = {}

    def visit(self, kv_2BKSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield from one all-gather."""
        rank, degree = self._ranks.rank, self._ranks.degree
        gathered = [torch.empty_like(kv_2BKSD) for _ in range(degree)]
        dist.all_gather(gathered, kv_2BKSD, group=self._ranks.group)
        for hop in range(degree):
            source = (rank - hop) % degree
            yield source, gathered[source]

    def add(self, source: int, grad_2BKSD: Tensor) -> None:
        """Keep it until all are here."""
        self._grads[source] = grad_2BKSD

    def total(self) -> Tensor:
        """Sum up by one reduce-scatter."""
        own_2BKSD = torch.empty_like(self._grads[self._ranks.rank])
        grads = [self._grads[source] for source in range(self._ranks.degree)]
        dist.reduce_scatter(own_2BKSD, grads, group=self._ranks.group)
        return own_2BKSD


class Ring:
    """Passes them from each rank to the next, while the caller works on what it has."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_transit: Message | None = None

    def visit(self, kv_2BKSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield what arrives from the rank before, hop by hop."""
        rank, degree = self._ranks.rank, self._ranks.degree
        for hop in range(degree - 1):
            following = Message(kv_2BKSD, ranks=self._ranks)
            yield (rank - hop) % degree, kv_2BKSD
            kv_2BKSD = following.receive()
        yield (rank + 1) % degree, kv_2BKSD

    def add(self, source: int, grad_2BKSD: Tensor) -> None:
        """Send it on, with what the ranks before have added: it follows its keys and so returns."""
        if self._in_transit is not None:
            grad_2BKSD += self._in_transit.receive()
        self._in_transit = Message(grad_2BKSD, ranks=self._ranks)

    def total(self) -> Tensor:
        """Return what arrives with the last hop."""
        assert self._in_transit is not None
        return self._in_transit.receive()


class Message:
    """A tensor sent to the next rank, and the one that arrives from the rank before."""

    def __init__(self, tensor: Tensor, *, ranks: Ranks) -> None:
        self._sent = tensor.contiguous()  # alive and unchanged until it has left
        self._received = torch.empty_like(self._sent)
        rank, degree, group = ranks.rank, ranks.degree, ranks.group
        following = dist.get_global_rank(group, (rank + 1) % degree)
        before = dist.get_global_rank(group, (rank - 1) % degree)
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, group=group),
                dist.P2POp(dist.irecv, self._received, before, group=group),
            ]
        )

    def receive(self) -> Tensor:
        """Wait for both."""
        for work in self._works:
            work.wait()
        return self._received


class _Attention(torch.autograd.Function):
    """Visits the keys and values of every rank; backward visits them again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        ranks: Ranks,
        transport: Callable[[Ranks], KVTransport],
        documents: Documents | None,
        whole: bool,
    ) -> Tensor:
        visit = partial(_visit_all, ranks=ranks, transport=transport, documents=documents)
        if whole:
            out_BHSD, lse_BHS = as_one_operator(visit, q_BHSD, k_BKSD, v_BKSD)
        else:
            out_BHSD, lse_BHS = visit(q_BHSD, k_BKSD, v_BKSD)
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS)
        ctx.ranks, ctx.transport, ctx.documents = ranks, transport, documents
        return out_BHSD

    @staticmethod
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS = ctx.saved_tensors
        ranks: Ranks = ctx.ranks
        transport: KVTransport = ctx.transport(ranks)
        dq_BHSD = torch.zeros_like(q_BHSD, dtype=torch.float32)
        for source, kv_2BKSD in transport.visit(torch.stack((k_BKSD, v_BKSD))):
            k, v = kv_2BKSD
            dkv_2BKSD = torch.zeros_like(kv_2BKSD, dtype=torch.float32)
            dk_BKSD, dv_BKSD = dkv_2BKSD
            for block in ranks.blocks(source, num_tokens=q_BHSD.shape[2], documents=ctx.documents):
                rows, cols = block.places
                dq, dk, dv = attend_backward(
                    grad_BHSD[rows],
                    q_BHSD[rows],
                    k[cols],
                    v[cols],
                    out_BHSD=out_BHSD[rows],
                    lse_BHS=lse_BHS[rows],
                    causal=block.causal,
                )
                dq_BHSD[rows] += dq
                dk_BKSD[cols] += dk
                dv_BKSD[cols] += dv
            transport.add(source, dkv_2BKSD)
        dk_BKSD, dv_BKSD = transport.total().to(k_BKSD.dtype)
        return dq_BHSD.to(q_BHSD.dtype), dk_BKSD, dv_BKSD, None, None, None, None


def _visit_all(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    ranks: Ranks,
    transport: Callable[[Ranks], KVTransport],
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, in q's dtype, and the log-sum-exp of the scores over all ranks' keys."""
    out_BHSD = torch.zeros(q_BHSD.shape, dtype=torch.float32, device=q_BHSD.device)
    lse_BHS = torch.full_like(out_BHSD[..., 0], -torch.inf)
    for source, (k, v) in transport(ranks).visit(torch.stack((k_BKSD, v_BKSD))):
        for block in ranks.blocks(source, num_tokens=q_BHSD.shape[2], documents=documents):
            rows, cols = block.places
            piece_BHSD, piece_lse_BHS = attend(q_BHSD[rows], k[cols], v[cols], causal=block.causal)
            merge(
                out_BHSD[rows],
                lse_BHS[rows],
                piece_BHSD=piece_BHSD,
                piece_lse_BHS=piece_lse_BHS,
            )
    return out_BHSD.to(q_BHSD.dtype), lse_BHS


class _Exchange(torch.autograd.Function):
    """All-to-all over dim 0, which is its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out, given = torch.empty_like(x, memory_format=torch.contiguous_format), x.contiguous()
        dist.all_to_all_single(out, given, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.group), None


def _exchange_heads(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    ranks: Ranks,
    documents: Documents | None,
    attend: Attend,
) -> Tensor:
    """Attend over the whole sequence with this rank's share of the heads."""
    degree, order = ranks.degree, ranks.layout.order()
    parts = [x.unflatten(1, (degree, -1)).movedim(1, 0) for x in (q_BHSD, k_BKSD, v_BKSD)]
    sizes = [part.shape[2] for part in parts]
    received = _Exchange.apply(torch.cat(parts, dim=2), ranks.group)  # one message for all three
    # (N, B, heads, S, D) -> the chunks of all ranks -> the sequence
    chunks = received.unflatten(3, (ranks.layout.chunks_a_rank, -1)).movedim(3, 1)
    chunks = chunks.flatten(0, 1).unbind(0)
    whole = torch.cat([chunks[place] for place in order], dim=2)
    q, k, v = whole.split(sizes, dim=1)
    out = attend(q, k, v, documents)
    # and all the way back
    pieces = out.unflatten(2, (len(order), -1)).unbind(2)
    held = [pieces[order.index(place)] for place in range(len(order))]
    given = torch.stack(held).unflatten(0, (degree, -1)).movedim(1, 3).flatten(3, 4)
    return _Exchange.apply(given, ranks.group).movedim(0, 1).flatten(1, 2)


def build_attention(
    method: Method, *, ranks: Ranks, whole: bool = False, of_heads: Attend = causal_attention
) -> Attend:
    """Return causal attention of this rank's queries to the keys and values of all ranks.

    `whole`: a ring or gather runs as one operator; the operators inside are not seen. `of_heads`:
    what Ulysses runs, on all tokens and the heads that a rank then has.
    """
    transport: Callable[[Ranks], KVTransport] = Gather if method == "allgather" else Ring

    def attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
        if method == "ulysses":
            return _exchange_heads(q, k, v, ranks=ranks, documents=documents, attend=of_heads)
        return _Attention.apply(q, k, v, ranks, transport, documents, whole)

    return attention


aten = torch.ops.aten
LSE_ALIGNMENT = 32
"""Rows to a multiple of which the CUDA kernel for float32 pads its log-sum-exp."""


def attend(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output, as q, and the log-sum-exp of the scores, float32 of shape (B, H, S)."""
    if q_BHSD.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q_BHSD, k_BKTD, v_BKTD, 0.0, causal)
    k_BHTD, v_BHTD = _spread(k_BKTD, like=q_BHSD), _spread(v_BKTD, like=q_BHSD)
    if q_BHSD.dtype == torch.float32:
        out_BHSD, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHSD, k_BHTD, v_BHTD, None, True, 0.0, causal
        )
        return out_BHSD, lse[..., : q_BHSD.shape[2]]
    out_BHSD, lse_BHS, *_ = aten._scaled_dot_product_flash_attention(
        q_BHSD, k_BHTD, v_BHTD, 0.0, causal
    )
    return out_BHSD, lse_BHS


def attend_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by this block, given output and log-sum-exp over all."""
    grad, out, lse = grad_BHSD.contiguous(), out_BHSD.contiguous(), lse_BHS.contiguous()
    if q_BHSD.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_BHSD, k_BKTD, v_BKTD, out, lse, 0.0, causal
        )
    k, v = _spread(k_BKTD, like=q_BHSD), _spread(v_BKTD, like=q_BHSD)
    unused = torch.zeros((), dtype=torch.int64, device=q_BHSD.device)  # state of a dropout of 0
    if q_BHSD.dtype == torch.float32:
        # rows of the padding have an infinite sum, so that their probabilities are 0
        lse = F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=torch.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q_BHSD, k, v, None, out, lse, unused, unused, 0.0, [True, True, True, False],
            causal,
        )  # fmt: skip
    else:
        lengths = q_BHSD.shape[2], k.shape[2]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q_BHSD, k, v, out, lse, None, None, *lengths, 0.0, causal, unused, unused
        )
    return dq, _collect(dk, like=k_BKTD), _collect(dv, like=v_BKTD)


def merge(out_BHSD: Tensor, lse_BHS: Tensor, *, piece_BHSD: Tensor, piece_lse_BHS: Tensor) -> None:
    """Take another piece into `out` and `lse`, float32, in place; they start as 0 and -inf.

    out = (e^lse out + e^lse' piece) / (e^lse + e^lse'), in a form that cannot overflow.
    """
    share_BHS1 = torch.sigmoid(piece_lse_BHS - lse_BHS)[..., None]
    out_BHSD.add_(share_BHS1 * (piece_BHSD - out_BHSD))
    torch.logaddexp(lse_BHS, piece_lse_BHS, out=lse_BHS)


def _spread(x_BKTD: Tensor, *, like: Tensor) -> Tensor:
    """Copy each key/value head for the query heads that it serves, on this device alone."""
    return x_BKTD.repeat_interleave(like.shape[1] // x_BKTD.shape[1], dim=1)


def _collect(grad_BHTD: Tensor, *, like: Tensor) -> Tensor:
    """Add up, in float32, the gradients of one key/value head's copies."""
    return grad_BHTD.unflatten(1, (like.shape[1], -1)).float().sum(2)
