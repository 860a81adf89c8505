"""Mixture of experts: each token is sent to few of many feed-forwards, whose results are weighed.

The router scores the experts for each token; the best K get it. All choices are then sorted by
expert, so that each expert multiplies its tokens as one matrix, and sorted back. No token is
dropped, and no expert padded: an expert may get any number of tokens, none too. (A fixed number of
places per expert would make all products of one shape, at the price that what a token comes to
depends on the other tokens of the batch.)

Both ways rows are gathered, in backward too, and a token's K results are added up in the order of
its choices: nothing is scattered into sums, whose order would be left to chance on a GPU. So the
same input gives the same bits, and a block that is recomputed chooses the same experts again.

The choice jumps where two scores nearly tie: rounding may then send a token elsewhere. Scores are
therefore computed in float32, whatever the type of the rest.

Shapes: B batch, S sequence, T = B S tokens, C = dim, H width of an expert, E experts, K experts of
a token, N = T K rows, one for each choice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention import LayerCache
from torchtitan.models.contract import CastsWeights, StackedExperts
from torchtitan.models.decoder import Block
from torchtitan.models.documents import Documents
from torchtitan.models.rope import Rope
from torchtitan.models.sizes import MoEConfig


class Gate(nn.Linear, CastsWeights):
    """The router's matrix. Its product is at least float32, whatever the type of its input."""

    def forward(self, x_TC: Tensor) -> Tensor:
        """Return the logits of the experts."""
        wide = torch.promote_types(x_TC.dtype, torch.float32)
        # first in the type of the input, as FSDP gathers it: the same numbers in every layout
        return F.linear(x_TC.to(wide), self.weight.to(x_TC.dtype).to(wide))


class Router(nn.Module):
    """Chooses the experts of each token, and their weights."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        assert config.expert_score in ("softmax", "sigmoid")
        self.gate = Gate(config.dim, config.num_experts, bias=False)
        self.num_chosen = config.num_experts_per_token
        self.is_softmax = config.expert_score == "softmax"
        self.norms, self.scale = config.norm_expert_weights, config.expert_weight_scale

    def forward(self, x_TC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token (T, K), the best first, and their weights in float32.

        Of experts with equal scores the one with the lower index is chosen.
        """
        logits_TE = self.gate(x_TC)
        scores_TE = logits_TE.softmax(-1) if self.is_softmax else logits_TE.sigmoid()
        # topk leaves open which of equal scores it takes
        order_TE = scores_TE.detach().sort(dim=-1, descending=True, stable=True).indices
        ids_TK = order_TE[:, : self.num_chosen]
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.norms:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return ids_TK, weights_TK * self.scale


class _Rows(torch.autograd.Function):
    """Rows of x in another order, each of them `times` times, by gathers in both directions.

    Row i is x[order[i] // times], and `back` undoes `order`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order_N: Tensor, back_N: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(back_N)
        ctx.times = times
        return x[order_N // times]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (back_N,) = ctx.saved_tensors
        return grads[0][back_N].unflatten(0, (-1, ctx.times)).sum(1), None, None, None


class Experts(StackedExperts, CastsWeights):
    """The experts of a layer: feed-forwards with SwiGLU, their matrices stacked."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        num, dim, hidden_dim = config.num_experts, config.dim, config.expert_hidden_dim
        self.num_chosen = config.num_experts_per_token
        self.w1 = nn.Parameter(torch.empty(num, hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num, dim, hidden_dim))
        self.w3 = nn.Parameter(torch.empty(num, hidden_dim, dim))

    def forward(self, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of what a token's experts make of it, summed in float32."""
        num_chosen = ids_TK.shape[1]
        sorted_N, order_N = ids_TK.flatten().sort(stable=True)
        back_N = order_N.argsort()
        experts_E = torch.arange(len(self.w1), device=x_TC.device)
        ends_E = torch.searchsorted(sorted_N, experts_E, right=True)
        x_NC = _Rows.apply(x_TC, order_N, back_N, num_chosen)
        out_NC = _Rows.apply(self._multiply(x_NC, ends_E), back_N, order_N, 1)
        out_TKC = out_NC.unflatten(0, (-1, num_chosen)).to(weights_TK.dtype)
        return (out_TKC * weights_TK[..., None]).sum(1).to(x_TC.dtype)

    def _multiply(self, x_NC: Tensor, ends_E: Tensor) -> Tensor:
        """Send rows, sorted by expert, through their experts; `ends_E` is where each one's end."""
        rows = x_NC.tensor_split(ends_E[:-1].tolist())  # the host waits for the device
        # unbound and not indexed, whose backward would make a whole stack for each expert
        weights = (w.to(x_NC.dtype).unbind() for w in (self.w1, self.w2, self.w3))
        return torch.cat(
            [
                F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
                for x, w1, w2, w3 in zip(rows, *weights, strict=True)
                if len(x)
            ]
        )


class MoE(nn.Module):
    """A router and its experts, in the place of a feed-forward."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.experts = Experts(config)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Transform each token by itself."""
        x_TC = x_BSC.flatten(0, 1)
        return self.experts(x_TC, *self.router(x_TC)).view_as(x_BSC)


class MoEBlock(Block):
    """A block with experts instead of one feed-forward."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        del self.feed_forward
        self.moe = MoE(config)

    def forward(
        self,
        x_BSC: Tensor,
        rope: Rope,
        documents: Documents | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Apply the block; only decoding has a cache."""
        x_BSC = x_BSC + self.attention(self.attention_norm(x_BSC), rope, documents, cache)
        return x_BSC + self.moe(self.ffn_norm(x_BSC))
