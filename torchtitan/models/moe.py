"""Mixture of experts: each token is sent to a few of many feed-forwards, weighted by a router.

The router scores the experts for each token, and the best K get it. The choices are then sorted by
expert, so that each expert multiplies its tokens as one matrix, and sorted back. An expert may get
any number of tokens, including none: no token is dropped and no expert padded. (A fixed capacity
per expert would give all products one shape, but the result for a token would depend on the other
tokens of the batch.)

Rows are gathered in both directions, in backward too, and a token's K results are added in the
order of its choices. Nothing is scattered into sums, whose order is not deterministic on a GPU. So
equal inputs give equal bits, and a block that is recomputed chooses the same experts again.

The choice is discontinuous: where two scores nearly tie, rounding may send a token elsewhere. So
scores are computed in float32 in every dtype of the model.

Nothing here knows of other ranks. Layouts and load balancing replace attributes: the choice of
experts (`Router.choose`) and its observer (`Router.on_choice`), an auxiliary loss
(`Router.extra_loss`), where rows are multiplied (`Experts.exchange`) and how (`Experts.compute`).

Shapes: B batch, S sequence, C = dim, H width of an expert, E experts, G groups of experts,
K experts per token, N = B S K rows, one per choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.decoder import Block, Decoder, FeedForward, swiglu
from torchtitan.models.interface import (
    CastsWeights,
    Compute,
    GroupedExperts,
    MoELayer,
    RouterModule,
)
from torchtitan.models.sizes import DecoderConfig, MoEConfig

TINY = 1e-20
"""Added to the sum that weights are divided by, since all sigmoids may be zero."""


class Gate(nn.Linear, CastsWeights):
    """The router's matrix. Its product is float32 or wider, for inputs of any dtype."""

    def __init__(self, dim: int, num_experts: int, *, bias: bool) -> None:
        super().__init__(dim, num_experts, bias=bias)
        self.product = wide_product

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Return the logits of the experts (B, S, E)."""
        return self.product(x_BSC, *self.parameters())


def wide_product(x_BSC: Tensor, *weights: Tensor) -> Tensor:
    """Return x @ weight.T, plus the bias if there is one, computed in float32 or wider."""
    wide = torch.promote_types(x_BSC.dtype, torch.float32)
    # round to the input's dtype first, as FSDP gathers it: the same numbers in every layout
    return F.linear(x_BSC.to(wide), *(w.to(x_BSC.dtype).to(wide) for w in weights))


def best_experts(scores_BSE: Tensor, *, num: int, num_groups: int = 1, kept: int = 1) -> Tensor:
    """Return the `num` experts with the highest scores, best first, (B, S, K).

    Of equal scores the lower index is chosen.

    `num_groups` is the number of groups of neighbouring experts, `kept` that of groups to choose
    from. A group's score is the sum of its best two.
    """
    if kept < num_groups:
        groups_BSGE = scores_BSE.unflatten(-1, (num_groups, -1))
        best_BSG = groups_BSGE.topk(min(2, groups_BSGE.shape[-1])).values.sum(-1)
        order_BSG = best_BSG.sort(dim=-1, descending=True, stable=True).indices
        is_excluded_BSG = torch.ones_like(best_BSG, dtype=torch.bool)
        is_excluded_BSG = is_excluded_BSG.scatter(-1, order_BSG[..., :kept], False)
        scores_BSE = groups_BSGE.masked_fill(is_excluded_BSG[..., None], -torch.inf).flatten(-2)
    # topk does not define which of equal scores it returns
    return scores_BSE.sort(dim=-1, descending=True, stable=True).indices[..., :num]


class Router(RouterModule):
    """Chooses the experts of each token, and their weights."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        assert config.expert_score in ("softmax", "sigmoid")
        self.gate = Gate(config.dim, config.num_experts, bias=config.expert_biases)
        self.is_softmax = config.expert_score == "softmax"
        self.norms, self.scale = config.norm_expert_weights, config.expert_weight_scale
        self._best = partial(
            best_experts,
            num=config.num_experts_per_token,
            num_groups=config.num_expert_groups or 1,
            kept=config.num_limited_groups or config.num_expert_groups or 1,
        )
        self.choose = self._choose
        self.on_choice = self.extra_loss = None

    def forward(self, x_BSC: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the experts of each token, best first, and their weights in float32, (B, S, K).

        The bias affects the choice but not the weights.
        """
        logits_BSE = self.gate(x_BSC)
        scores_BSE = logits_BSE.softmax(-1) if self.is_softmax else logits_BSE.sigmoid()
        ids_BSK = self.choose(scores_BSE.detach(), bias_E)
        if self.norms and self.is_softmax:
            # equal to dividing by the sum, but the experts not chosen have no gradient at all,
            # not one of rounding errors, from which Adam would make a step
            weights_BSK = logits_BSE.gather(-1, ids_BSK).softmax(-1)
        else:
            weights_BSK = scores_BSE.gather(-1, ids_BSK)
            if self.norms:
                weights_BSK = weights_BSK / (weights_BSK.sum(-1, keepdim=True) + TINY)
        if self.extra_loss is not None and torch.is_grad_enabled():
            extra = self.extra_loss(logits_BSE, scores_BSE, ids_BSK)
            weights_BSK = _WithLoss.apply(weights_BSK, extra)
        return ids_BSK, weights_BSK * self.scale

    def _choose(self, scores_BSE: Tensor, bias_E: Tensor | None) -> Tensor:
        ids_BSK = self._best(scores_BSE if bias_E is None else scores_BSE + bias_E)
        if self.on_choice is not None and torch.is_grad_enabled():
            self.on_choice(scores_BSE, ids_BSK)
        return ids_BSK


class _WithLoss(torch.autograd.Function):
    """Returns the tensor, and starts a backward of the loss whenever the tensor has one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.loss = loss.new_ones(())
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.loss


def has_row_kernels(rows_NC: Tensor) -> bool:
    """Return whether sums of rows, and products with float32 results, are one kernel each."""
    return rows_NC.is_cuda and rows_NC.dtype == torch.bfloat16 and torch.version.hip is None


def add_rows(rows_NC: Tensor, index_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Return the weighted sum of K rows for each token, in order (T, C), added in float32.

    In bfloat16 on NVIDIA's GPUs it reads each row once. Otherwise there are copies of all rows, the
    weighted ones in the dtype of the weights.
    """
    if not has_row_kernels(rows_NC):
        rows_TKC = rows_NC[index_TK]
        if weights_TK is not None:
            rows_TKC = rows_TKC * weights_TK[..., None]
        return rows_TKC.sum(1).to(rows_NC.dtype)
    if weights_TK is None:
        return F.embedding_bag(index_TK, rows_NC, mode="sum")
    # the kernel takes bfloat16 weights: two of them hold 16 bits of a float32 one
    high_TK = weights_TK.to(rows_NC.dtype)
    low_TK = (weights_TK - high_TK).to(rows_NC.dtype)
    return F.embedding_bag(
        index_TK.repeat_interleave(2, 1),
        rows_NC,
        mode="sum",
        per_sample_weights=torch.stack([high_TK, low_TK], -1).flatten(1),
    )


def _multiply_rows(rows_TKC: Tensor, x_TC: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Return the products of each token's rows with x (T, K), added in `dtype`."""
    if has_row_kernels(rows_TKC):
        return torch.bmm(rows_TKC, x_TC[..., None], out_dtype=dtype).squeeze(-1)
    return (x_TC[:, None].to(dtype) * rows_TKC).sum(-1)


def invert(order_N: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    places_N = torch.arange(len(order_N), device=order_N.device)
    return torch.empty_like(order_N).scatter_(0, order_N, places_N)


class _Reorder(torch.autograd.Function):
    """See `reorder`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_N: Tensor, back_N: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back_N)
        ctx.times = times
        return x[order_N // times]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back_N,), times = ctx.saved_tensors, ctx.times
        grad = grads[0]
        dx = grad[back_N] if times == 1 else add_rows(grad, back_N.unflatten(0, (-1, times)))
        return dx, None, None, None


def reorder(x: Tensor, order_N: Tensor, back_N: Tensor, times: int = 1) -> Tensor:
    """Repeat each row `times` times and permute the result, by gathers in both directions.

    Row i of the result is x[order[i] // times]; `back_N` is the inverse permutation.
    """
    rows: Tensor = _Reorder.apply(x, order_N, back_N, times)
    return rows


class _Combine(torch.autograd.Function):
    """See `combine`."""

    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, weights_TK: Tensor, order_N: Tensor, back_N: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_NC, weights_TK, order_N, back_N)
        return add_rows(x_NC, back_N.view_as(weights_TK), weights_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, weights_TK, order_N, back_N = ctx.saved_tensors
        token_N1 = order_N[:, None] // weights_TK.shape[1]
        dx_NC = add_rows(grads[0], token_N1, weights_TK.flatten()[order_N, None])
        rows_TKC = x_NC[back_N.view_as(weights_TK)]
        dtype = weights_TK.dtype
        return dx_NC, _multiply_rows(rows_TKC, grads[0], dtype=dtype), None, None


def combine(x_NC: Tensor, weights_TK: Tensor, order_N: Tensor, back_N: Tensor) -> Tensor:
    """Return the weighted sum of each token's K rows (T, C).

    Row i of `x_NC` belongs to choice order[i], of token order[i] // K; `back_N` is the inverse
    permutation. Weights are in the order of the tokens.
    """
    rows: Tensor = _Combine.apply(x_NC, weights_TK, order_N, back_N)
    return rows


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate sigmoid(1.702 gate) (up + 1) of clamped values (arXiv:2508.10925)."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def multiply_per_expert(x_NC: Tensor, counts_E: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Apply each expert to its rows, expert by expert: w2(silu(w1 x) * w3 x), or with biases, whose
    SwiGLU is the clamped one."""
    rows = x_NC.split(counts_E.tolist())  # the host waits for the device
    # unbind, not indexing, whose backward would allocate a full stack per expert
    experts = zip(rows, *(w.to(x_NC.dtype).unbind() for w in weights), strict=True)
    return torch.cat(
        [
            _apply_expert(x, *matrices)
            for i, (x, *matrices) in enumerate(experts)
            if len(x) or i == 0  # without any rows there still are gradients, of zeros
        ]
    )


def _apply_expert(x_NC: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *biases: Tensor) -> Tensor:
    if not biases:
        return F.linear(swiglu(F.linear(x_NC, w1), F.linear(x_NC, w3)), w2)
    b1, b2, b3 = biases
    return F.linear(clamped_swiglu(F.linear(x_NC, w1, b1), F.linear(x_NC, w3, b3)), w2, b2)


MAX_ELEMENTS = 2**31 - 1
"""Most rows of a grouped product. The kernel cannot address more (torchtitan issue 1932)."""


class _ZeroGradient(torch.autograd.Function):
    """Returns the weights. The gradients of empty experts are zero, whatever backward returns."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, empty_E: Tensor) -> Tensor:
        ctx.save_for_backward(empty_E)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (empty_E,) = ctx.saved_tensors
        return grads[0].masked_fill(empty_E[:, None, None], 0), None


def _leaves_garbage(device: torch.device) -> bool:
    """Return whether the kernel leaves gradients of experts without rows unwritten.

    On Blackwell it does: pytorch issue 172439, CUTLASS issue 2674.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 10


def multiply_grouped(x_NC: Tensor, counts_E: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Do the same by three grouped products, where `parallel.expert.why_not_grouped` allows it.

    Rows of more elements than a kernel can address are multiplied in parts, whose gradients of the
    weights are rounded before they are added.
    """
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    weights = [w.to(x_NC.dtype) for w in weights]
    limit = MAX_ELEMENTS // max(weights[0].shape[1:])
    if len(x_NC) <= limit:
        return _multiply_part(x_NC, ends_E, weights)
    return torch.cat(
        [
            _multiply_part(part, (ends_E - i * limit).clamp(0, len(part)), weights)
            for i, part in enumerate(x_NC.split(limit))
        ]
    )


def _multiply_part(x_NC: Tensor, ends_E: Tensor, weights: Sequence[Tensor]) -> Tensor:
    matrices, biases = weights[:3], weights[3:]
    if _leaves_garbage(x_NC.device):
        empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
        matrices = [_ZeroGradient.apply(w, empty_E) for w in matrices]
    w1, w2, w3 = (w.mT for w in matrices)
    gate_NH, up_NH = (F.grouped_mm(x_NC, w, offs=ends_E) for w in (w1, w3))
    if not biases:
        return F.grouped_mm(swiglu(gate_NH, up_NH), w2, offs=ends_E)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    b1_NH, b2_NC, b3_NH = (b.repeat_interleave(counts_E, 0, output_size=len(x_NC)) for b in biases)
    hidden_NH = clamped_swiglu(gate_NH + b1_NH, up_NH + b3_NH)
    return F.grouped_mm(hidden_NH, w2, offs=ends_E) + b2_NC


class Experts(GroupedExperts, CastsWeights):
    """The experts of a layer: SwiGLU feed-forwards with stacked matrices."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        num, dim, hidden_dim = config.num_experts, config.dim, config.expert_width
        self.num_chosen = config.num_experts_per_token
        self.w1 = nn.Parameter(torch.empty(num, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num, hidden_dim, dim))
        if config.expert_biases:
            self.b1 = nn.Parameter(torch.empty(num, hidden_dim))
            self.b2 = nn.Parameter(torch.empty(num, dim))
            self.b3 = nn.Parameter(torch.empty(num, hidden_dim))
        self.compute: Compute = multiply_per_expert

    def forward(self, x_BSC: Tensor, ids_BSK: Tensor, weights_BSK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts (B S, C), added in float32."""
        num_chosen = ids_BSK.shape[-1]
        sorted_N, order_N = ids_BSK.flatten().sort(stable=True)
        back_N = invert(order_N)
        experts_E = torch.arange(len(self.w1), device=x_BSC.device)
        ends_E = torch.searchsorted(sorted_N, experts_E, right=True)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        x_NC = reorder(x_BSC.flatten(0, 1), order_N, back_N, num_chosen)
        out_NC = self.exchange(self.compute, x_NC, counts_E, tuple(self.parameters()))
        return combine(out_NC, weights_BSK.flatten(0, 1), order_N, back_N)


class MoE(MoELayer, CastsWeights):
    """A router and its experts, in place of a feed-forward.

    All shared experts together are one feed-forward of their total width.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)
        shared = (config.num_shared_experts or 0) * config.expert_width
        self.shared_experts = FeedForward(replace(config, hidden_dim=shared)) if shared else None
        self.expert_bias = None
        if config.expert_bias:
            bias_E = torch.empty(config.num_experts, dtype=torch.float32)
            self.expert_bias = nn.Parameter(bias_E, requires_grad=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Transform each token independently."""
        out_BSC = self.route(x_BSC)
        return out_BSC if self.shared_experts is None else out_BSC + self.shared_experts(x_BSC)

    def route(self, x_BSC: Tensor) -> Tensor:
        """Send each token to its experts."""
        # FSDP, which shards the experts, warns of modules that return views
        return self.experts(x_BSC, *self.router(x_BSC, self.expert_bias)).view_as(x_BSC)


class MoEBlock(Block):
    """A block with experts instead of one feed-forward."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        del self.feed_forward
        self.moe = MoE(config)

    def transform(self, x_BSC: Tensor) -> Tensor:
        """Transform each token independently."""
        return self.moe(x_BSC)


class MoEDecoder(Decoder):
    """The decoder with experts in all layers but the first `num_dense_layers`."""

    def build_block(self, layer: int, sizes: DecoderConfig) -> Block:
        """Return the block of a layer, with experts if the layer has some."""
        assert isinstance(sizes, MoEConfig)
        return MoEBlock(sizes) if sizes.has_experts(layer) else Block(sizes)
