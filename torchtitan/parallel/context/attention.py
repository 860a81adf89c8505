"""Context parallelism: ranks share each sequence, so that memory per rank falls with their number.

Everything but attention works on each token independently. A rank computes its part of the sequence
like a sequence of its own, with the right positions (`SequenceShard`), and only attention also
needs the keys and values of other ranks. Parameters are sharded over these ranks as over those of
FSDP, whose sum of gradients is also the sum over the sequence.

Causal attention over a sharded sequence takes one of three forms:

    all-gather  every rank gets all keys and values at once. Simple, and fastest on fast links, but
                each rank holds the keys and values of the full sequence
    ring        keys and values pass from rank to rank, and the next ones arrive while the current
                ones are used (arXiv:2310.01889). A rank holds only its own part
    ulysses     an all-to-all turns parts of the sequence into parts of the heads, each rank attends
                over the full sequence with its heads, and a second all-to-all turns back
                (arXiv:2309.14509). Needs enough heads

The first two are one autograd function that visits the keys of every rank. They differ only in the
transport of keys, values and their gradients. Keys and values are sent with their own number of
heads, in their own dtype, as one message. Gradients are summed and sent in float32.

**Merging.** To merge the results for several blocks of keys exactly and in any order, softmax needs
the log-sum-exp of each block's scores next to its output (arXiv:2205.14135). PyTorch's public
attention does not return it, so the operators below it are called, one per kind of device and
dtype. Backward takes the *merged* output and log-sum-exp, so the gradients of a block are right
without the other blocks. No kernel stores a matrix of scores. Only a block that a window
cuts takes a mask, of its size, and on CUDA the kernel for float32, which flash attention lacks.

The 16-bit kernel needs a head width that is a multiple of 8.

Shapes: B batch, H query heads, K key/value heads, S tokens of this rank, T keys, D head width,
N ranks. 2 is keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.base.errors import ConfigError
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.attention import causal_attention
from torchtitan.models.interface import Attend, AttentionModule, Documents, LanguageModel
from torchtitan.models.kernels import attend, attend_backward, sinks_backward
from torchtitan.parallel.activation import keep_for_recomputation
from torchtitan.parallel.context.layout import Block, SequenceLayout, find_blocks

Method = Literal["allgather", "ring", "alltoall", "ulysses"]
DEGREE, METHOD = (f"parallelism.context_parallel_{name}" for name in ("degree", "rotate_method"))


def check_attention(model: LanguageModel, *, parallelism: ParallelismConfig) -> None:
    """Raise ConfigError unless the model's attention can be sharded over ranks.

    Ulysses needs a multiple of its degree times tp as the number of heads.
    """
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    for name, block in model.layers.items():
        if not any(isinstance(module, AttentionModule) for module in block.modules()):
            raise ConfigError.at(
                DEGREE,
                f"must be 1 for a model with its own kind of attention, got {cp}: layers.{name} "
                f"contains no AttentionModule (torchtitan.models.interface)",
            )
    if parallelism.context_parallel_rotate_method != "ulysses":
        return
    heads = {"query": model.config.num_heads, "key/value": model.config.num_kv_heads}
    for name, count in heads.items():
        if count % (cp * tp):
            raise ConfigError.at(
                (METHOD, DEGREE, "parallelism.tensor_parallel_degree"),
                f"ulysses splits heads: the model's {count} {name} heads must be a multiple of "
                f"{cp * tp} (context_parallel_degree {cp} x tensor_parallel_degree {tp}); lower a "
                f'degree, or write "ring" or "allgather", which have no such limit',
            )


def apply_context_parallel(
    model: nn.Module, *, mesh: Mesh, parallelism: ParallelismConfig, keep_output: bool = False
) -> None:
    """Make the attention of `model` reach the keys and values of other ranks, in place."""
    layout = SequenceLayout.from_config(parallelism)
    group = mesh.data.get_group("cp")
    for module in model.modules():
        if isinstance(module, AttentionModule):
            module.attend = build_attention(
                parallelism.context_parallel_rotate_method,
                ranks=Ranks(group=group, layout=replace(layout, window=module.window)),
                keep_output=keep_output,
                local_attend=module.attend,
            )


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks that share a sequence, and their parts of it."""

    group: dist.ProcessGroup
    layout: SequenceLayout

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return dist.get_rank(self.group)

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.layout.degree

    def blocks(self, source: int, *, num_tokens: int, documents: Documents | None) -> list[Block]:
        """Return the blocks of this rank's queries and the keys of rank `source`.

        `num_tokens` is the number of tokens per rank.
        """
        seq_len = num_tokens * self.degree
        return find_blocks(self.layout, self.rank, source, seq_len, documents)


class Gather:
    """Transports keys and values of all ranks to this one, and their gradients back, at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._grads: dict[int, Tensor] = {}

    def visit(self, kv_2BKSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of each rank, this one's first, and its keys and values."""
        rank, degree = self._ranks.rank, self._ranks.degree
        gathered = [torch.empty_like(kv_2BKSD) for _ in range(degree)]
        dist.all_gather(gathered, kv_2BKSD, group=self._ranks.group)
        for hop in range(degree):
            source = (rank - hop) % degree
            yield source, gathered[source]

    def add(self, source: int, grad_2BKSD: Tensor) -> None:
        """Take the gradient, float32, of the keys and values that `visit` yielded last."""
        self._grads[source] = grad_2BKSD

    def total(self) -> Tensor:
        """Return the gradient of this rank's own keys and values, summed over all ranks."""
        own_2BKSD = torch.empty_like(self._grads[self._ranks.rank])
        grads = [self._grads[source] for source in range(self._ranks.degree)]
        dist.reduce_scatter(own_2BKSD, grads, group=self._ranks.group)
        return own_2BKSD


class Ring:
    """As `Gather`, but passes keys and values to the next rank while the caller uses the current
    ones."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._in_transit: Message | None = None

    def visit(self, kv_2BKSD: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield what arrives from the previous rank, hop by hop."""
        rank, degree = self._ranks.rank, self._ranks.degree
        for hop in range(degree - 1):
            following = Message(kv_2BKSD, ranks=self._ranks)
            yield (rank - hop) % degree, kv_2BKSD
            kv_2BKSD = following.receive()
        yield (rank + 1) % degree, kv_2BKSD

    def add(self, source: int, grad_2BKSD: Tensor) -> None:
        """Add the gradient to the sum of earlier ranks, and send it on to the keys' owner."""
        if self._in_transit is not None:
            grad_2BKSD += self._in_transit.receive()
        self._in_transit = Message(grad_2BKSD, ranks=self._ranks)

    def total(self) -> Tensor:
        """Return the gradient that arrives with the last hop."""
        assert self._in_transit is not None
        return self._in_transit.receive()


class Message:
    """A tensor on its way to the next rank, and one arriving from the previous rank."""

    def __init__(self, tensor: Tensor, *, ranks: Ranks) -> None:
        self._sent = tensor.contiguous()  # kept, and not changed, until it has been sent
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
        """Wait for both, and return the tensor that arrived."""
        for work in self._works:
            work.wait()
        return self._received


KVTransport = Gather | Ring


class _Attention(torch.autograd.Function):
    """Attends to the keys and values of every rank. Backward visits all of them again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BHSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        ranks: Ranks,
        transport: Callable[[Ranks], KVTransport],
        documents: Documents | None,
        sinks_H: Tensor | None,
        keep_output: bool,
    ) -> Tensor:
        def attend_all() -> tuple[Tensor, Tensor]:
            return _attend_all(q_BHSD, k_BKSD, v_BKSD, ranks, transport, documents, sinks_H)

        out_BHSD, lse_BHS = keep_for_recomputation(attend_all) if keep_output else attend_all()
        # autograd adds a history to the tensor that is returned, and the one that is kept has none
        out_BHSD = out_BHSD.detach()
        ctx.save_for_backward(q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS, sinks_H)
        ctx.ranks, ctx.transport, ctx.documents = ranks, transport, documents
        return out_BHSD

    @staticmethod
    def backward(ctx: Any, grad_BHSD: Tensor) -> tuple[Tensor | None, ...]:
        q_BHSD, k_BKSD, v_BKSD, out_BHSD, lse_BHS, sinks_H = ctx.saved_tensors
        ranks: Ranks = ctx.ranks
        transport: KVTransport = ctx.transport(ranks)
        dq_BHSD = torch.zeros_like(q_BHSD, dtype=torch.float32)
        for source, kv_2BKSD in transport.visit(torch.stack((k_BKSD, v_BKSD))):
            k, v = kv_2BKSD
            dkv_2BKSD = torch.zeros_like(kv_2BKSD, dtype=torch.float32)
            dk_BKSD, dv_BKSD = dkv_2BKSD
            for block in ranks.blocks(source, num_tokens=q_BHSD.shape[2], documents=ctx.documents):
                rows, cols = block.slices
                dq, dk, dv = attend_backward(
                    grad_BHSD[rows],
                    q_BHSD[rows],
                    k[cols],
                    v[cols],
                    out_BHSD=out_BHSD[rows],
                    lse_BHS=lse_BHS[rows],
                    causal=block.causal,
                    band=block.band,
                )
                dq_BHSD[rows] += dq
                dk_BKSD[cols] += dk
                dv_BKSD[cols] += dv
            transport.add(source, dkv_2BKSD)
        dk_BKSD, dv_BKSD = transport.total().to(k_BKSD.dtype)
        dsinks_H = None
        if sinks_H is not None:
            dsinks_H = sinks_backward(sinks_H, grad_BHSD, out_BHSD=out_BHSD, lse_BHS=lse_BHS)
        return dq_BHSD.to(q_BHSD.dtype), dk_BKSD, dv_BKSD, None, None, None, dsinks_H, None


def _attend_all(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    ranks: Ranks,
    transport: Callable[[Ranks], KVTransport],
    documents: Documents | None,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, in q's dtype, and the log-sum-exp of the scores over all keys.

    Sinks are merged once, before any keys: a score with the value 0.
    """
    out_BHSD = torch.zeros(q_BHSD.shape, dtype=torch.float32, device=q_BHSD.device)
    lse_BHS = torch.full_like(out_BHSD[..., 0], -torch.inf)
    if sinks_H is not None:
        lse_BHS.copy_(sinks_H[:, None])
    for source, (k, v) in transport(ranks).visit(torch.stack((k_BKSD, v_BKSD))):
        for block in ranks.blocks(source, num_tokens=q_BHSD.shape[2], documents=documents):
            rows, cols = block.slices
            out, lse = attend(q_BHSD[rows], k[cols], v[cols], causal=block.causal, band=block.band)
            merge(out_BHSD[rows], lse_BHS[rows], piece_BHSD=out, piece_lse_BHS=lse)
    return out_BHSD.to(q_BHSD.dtype), lse_BHS


class _AllToAll(torch.autograd.Function):
    """All-to-all over dimension 0. Its gradient is another all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, ctx.group), None


def _attend_with_own_heads(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    ranks: Ranks,
    documents: Documents | None,
    sinks_H: Tensor | None,
    attend: Attend,
) -> Tensor:
    """Attend over the full sequence with this rank's share of the heads."""
    degree, order = ranks.degree, ranks.layout.order()
    parts = [x.unflatten(1, (degree, -1)).movedim(1, 0) for x in (q_BHSD, k_BKSD, v_BKSD)]
    sizes = [part.shape[2] for part in parts]
    received = _AllToAll.apply(torch.cat(parts, dim=2), ranks.group)  # one message for all three
    # (N, B, heads, S, D) -> the chunks of all ranks -> the sequence
    chunks = received.unflatten(3, (ranks.layout.chunks_per_rank, -1)).movedim(3, 1)
    chunks = chunks.flatten(0, 1).unbind(0)
    sequence = torch.cat([chunks[index] for index in order], dim=2)
    q, k, v = sequence.split(sizes, dim=1)
    own_sinks = None if sinks_H is None else sinks_H.unflatten(0, (degree, -1))[ranks.rank]
    out = attend(q, k, v, documents, own_sinks)
    # and back in the reverse order
    pieces = out.unflatten(2, (len(order), -1)).unbind(2)
    by_rank = torch.stack([pieces[order.index(index)] for index in range(len(order))])
    sent = by_rank.unflatten(0, (degree, -1)).movedim(1, 3).flatten(3, 4)
    return _AllToAll.apply(sent, ranks.group).movedim(0, 1).flatten(1, 2)


def build_attention(
    method: Method,
    *,
    ranks: Ranks,
    keep_output: bool = False,
    local_attend: Attend = causal_attention,
) -> Attend:
    """Return causal attention of this rank's queries to the keys and values of all ranks.

    With `keep_output` a block that is recomputed repeats no messages of a ring or an all-gather.
    `local_attend` is what Ulysses calls, over all tokens with the heads that a rank then has.
    "alltoall" is torchtitan 0.2's name of the ring.
    """
    transport: Callable[[Ranks], KVTransport] = Gather if method == "allgather" else Ring

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Documents | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if method == "ulysses":
            return _attend_with_own_heads(
                q, k, v, ranks=ranks, documents=documents, sinks_H=sinks, attend=local_attend
            )
        return _Attention.apply(q, k, v, ranks, transport, documents, sinks, keep_output)

    return attention


def merge(out_BHSD: Tensor, lse_BHS: Tensor, *, piece_BHSD: Tensor, piece_lse_BHS: Tensor) -> None:
    """Merge another block's result into `out` and `lse`, float32, in place.

    They start as 0 and -inf.

    out = (e^lse out + e^lse' piece) / (e^lse + e^lse'), in a form that cannot overflow.
    """
    share_BHS1 = torch.sigmoid(piece_lse_BHS - lse_BHS)[..., None]
    out_BHSD.add_(share_BHS1 * (piece_BHSD - out_BHSD))
    torch.logaddexp(lse_BHS, piece_lse_BHS, out=lse_BHS)
