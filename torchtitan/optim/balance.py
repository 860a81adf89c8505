"""Balancing the load of experts: a bias in choosing, losses of the router, and what is reported.

Left alone, a router sends more and more tokens to the experts that learned first. Four ways against
it, each off unless its setting is given:

**A bias** (arXiv:2408.15664) is added to the experts' scores in choosing alone. After each step it
grows by a fixed rate for experts with fewer tokens than the mean, and falls for those with more:

    b_i += rate * sign(mean - n_i),  n_i tokens of expert i in the global batch

No gradient is bent by it. The numbers are integers, summed over all ranks once per step, so that
every layout has the same biases bit for bit, as long as it makes the same choices.

**Losses**, sums over tokens t under the divisor of the model's own loss, N valid labels:

    sequence  w / N * sum_t sum_i f_i s'_ti,  f_i = E n_i / (K S), n_i of the sequence of S tokens
    global    the same, with n_i of the whole global batch, of the step before
    z         w / N * sum_t logsumexp(logits_t)^2

with s' the scores of a token divided by their sum. The first is that of DeepSeek-V3
(arXiv:2412.19437, 17 to 20), except that choices count as they were made, bias included. Where a
sequence is cut over ranks, its counts are summed over them; the rest is a sum over tokens, which
any rank may have. The second follows arXiv:2501.11873: over a global batch experts may specialise,
which a balance within each sequence, or each rank's few, forbids. The counts of a step are known
when it is over, so those of the step before take their place: the loss is then a sum over tokens
too, the same for any cut of the batch into ranks and microbatches. The third is ST-MoE's
(arXiv:2202.08906). Their gradients join those of the model where the router computes its weights;
the model's loss stays what it is, and each is reported by itself.

Only training counts: nothing without gradients, a block that is recomputed no second time, and no
token that only fills a sample up.

Shapes: L layers with experts, B sequences, S tokens of each on this rank, E experts, K of a token,
F figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchtitan.base.errors import ConfigError
from torchtitan.mesh.dims import Mesh
from torchtitan.models.contract import Counts
from torchtitan.models.moe import TINY
from torchtitan.models.routing import Routes, find_routes
from torchtitan.models.trained import Trained
from torchtitan.optim.settings import RouterConfig

LOSSES = ("sequence_loss", "global_loss", "z_loss")
FIGURES = ("tokens", "entropy", *LOSSES)


def check_balance(settings: RouterConfig, *, model: nn.Module) -> None:
    """Check that the model has what the settings are for.

    Raises:
        ConfigError: It has no experts, or no bias.
    """
    routes = find_routes(model).values()
    default = RouterConfig()
    given = [key for key, value in vars(default).items() if getattr(settings, key) != value]
    if given and not routes:
        keys = tuple(f"router.{key}" for key in given)
        raise ConfigError.at((*keys, "model.name"), "needs a model with experts; remove it")
    if settings.bias_update_rate and all(one.expert_bias is None for one in routes):
        raise ConfigError.at(
            ("router.bias_update_rate", "model.expert_bias"),
            "needs a model whose experts have a bias; write model.expert_bias = true, or remove it",
        )


def build_balance(
    settings: RouterConfig,
    *,
    parts: Iterable[nn.Module],
    counts: Counts,
    trained: Trained,
    mesh: Mesh,
    device: torch.device,
) -> Balance | None:
    """Build what follows the routers of this rank's parts of the model; None: it has no experts.

    `counts`: of the whole model. `trained`: a bias that it leaves out is not moved.
    """
    if not counts.num_experts:
        return None
    routes = {name: route for part in parts for name, route in find_routes(part).items()}
    axes = {"cp": mesh.dims.cp, "tp": mesh.dims.tp}
    return Balance(
        settings,
        routes=routes,
        frozen={name for name in routes if not trained.includes(f"{name}.expert_bias")},
        num_experts=counts.num_experts,
        groups=[mesh.data.get_group(axis) for axis, degree in axes.items() if degree > 1],
        tp=(mesh.data.get_local_rank("tp"), mesh.dims.tp),
        device=device,
    )


class Balance:
    """Counts what the routers choose, moves their biases, and adds their losses.

    `routes`: this rank's layers with experts; it may have none. `frozen`: those whose bias stays.
    `num_experts`: of every rank's.
    `groups`: the ranks that, one group after the other, hold the rest of this rank's sequences.
    `tp`: this rank's place among those that route a part each of the same ones, and their number.
    """

    def __init__(
        self,
        settings: RouterConfig,
        *,
        routes: Mapping[str, Routes],
        frozen: Container[str] = (),
        num_experts: Mapping[str, int],
        groups: Sequence[dist.ProcessGroup],
        tp: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._settings, self._groups = settings, groups
        self._names, self._sizes = list(num_experts), list(num_experts.values())
        sizes_L1 = torch.tensor(self._sizes, device=device)[:, None]
        self._num_experts_L1 = sizes_L1
        self._is_expert_LE = torch.arange(max(self._sizes), device=device) < sizes_L1
        self._counts_LE = self._is_expert_LE.long() * 0
        self._last_LE = self._counts_LE.clone()  # of all ranks, in the last step that was taken
        self._sums_LF = torch.zeros(
            len(self._sizes), len(FIGURES), dtype=torch.float64, device=device
        )
        self._figures_LF = self._sums_LF.clone()
        self._divisor = torch.ones((), device=device)
        self._is_new = False
        self._tp, self._is_text = tp, None
        self._num_seen: Counter[int] = Counter()
        self._counted = WeakTensorKeyDictionary()  # by what a layer chose, as long as that lives
        rows = {name: self._names.index(name) for name in routes}
        for name, route in routes.items():
            route.router.on_choice = partial(self._count, rows[name])
            if any(getattr(settings, f"{loss}_weight") for loss in LOSSES):
                route.router.extra_loss = partial(self._loss, rows[name])
        moved = {name: route for name, route in routes.items() if name not in frozen}
        biases = {rows[name]: route.expert_bias for name, route in moved.items()}
        self._biases = {row: bias for row, bias in biases.items() if bias is not None}

    def begin(self, divisor: Tensor, *, padding: Sequence[Tensor | None] = ()) -> None:
        """Begin a step whose losses are divided by `divisor`.

        `padding`: which tokens of this rank only fill samples up, batch by batch, bool (B, S);
        None: none do.
        """
        self._divisor = divisor
        told = [is_padding for is_padding in padding if is_padding is not None]
        self._is_text = self._own_part(~torch.cat(told)) if told else None
        self._num_seen.clear()
        self._counted.clear()
        self._counts_LE.zero_()
        self._sums_LF.zero_()

    def _own_part(self, x_BS: Tensor) -> Tensor:
        """Return the part of local sequences that this rank routes."""
        rank, degree = self._tp
        parts = x_BS.chunk(degree, dim=1)
        return parts[rank] if rank < len(parts) else x_BS[:, :0]

    def _next_text(self, row: int, ids_BSK: Tensor) -> Tensor:
        """Return 1 for each token that counts, of the batches that come to a layer in turn."""
        if self._is_text is None:
            return torch.ones_like(ids_BSK[..., 0])
        start = self._num_seen[row]
        self._num_seen[row] += len(ids_BSK)
        return self._is_text[start : start + len(ids_BSK)].long()

    @torch.no_grad()
    def _count(self, row: int, scores_BSE: Tensor, ids_BSK: Tensor) -> None:
        """Hear of the choices of a layer's tokens."""
        text_BS = self._next_text(row, ids_BSK)
        # a block that is recomputed asks for its losses again, with the same tensor
        self._counted[ids_BSK] = text_BS
        num = self._counts_LE.shape[1]
        self._counts_LE[row] += _counts(ids_BSK, text_BS, num=num).sum(0)
        self._sums_LF[row, 0] += text_BS.sum()
        self._sums_LF[row, 1] += (torch.special.entr(_shares(scores_BSE)).sum(-1) * text_BS).sum()
        self._is_new = True

    def _loss(self, row: int, logits_BSE: Tensor, scores_BSE: Tensor, ids_BSK: Tensor) -> Tensor:
        """Return a layer's own losses, of this rank's tokens."""
        settings, text_BS = self._settings, self._counted[ids_BSK]
        shares_BSE = _shares(scores_BSE) * text_BS[..., None]
        losses: dict[str, Tensor] = {}
        if settings.sequence_loss_weight:
            num = scores_BSE.shape[-1]
            load_BE = _load(self._counts_of_sequences(ids_BSK, text_BS, num=num))
            balance = (load_BE[:, None].to(shares_BSE.dtype) * shares_BSE).sum()
            losses["sequence_loss"] = settings.sequence_loss_weight * balance
        if settings.global_loss_weight:
            load_E = _load(self._last_LE[row, : scores_BSE.shape[-1]])
            balance = (load_E.to(shares_BSE.dtype) * shares_BSE).sum()
            losses["global_loss"] = settings.global_loss_weight * balance
        if settings.z_loss_weight:
            squares_BS = logits_BSE.logsumexp(-1).square()
            losses["z_loss"] = settings.z_loss_weight * (squares_BS * text_BS).sum()
        if self._is_new:  # a block that is recomputed chooses no second time
            self._is_new = False
            for name, loss in losses.items():
                self._sums_LF[row, FIGURES.index(name)] += loss.detach() / self._divisor
        return torch.stack([*losses.values()]).sum() / self._divisor

    @torch.no_grad()
    def _counts_of_sequences(self, ids_BSK: Tensor, text_BS: Tensor, *, num: int) -> Tensor:
        counts_BE = _counts(ids_BSK, text_BS, num=num)
        for group in self._groups:
            dist.all_reduce(counts_BE, group=group)
        return counts_BE

    @torch.no_grad()
    def update(self, *, norm: Tensor) -> None:
        """End a step on all ranks, and move the biases if it was taken: if `norm` is finite."""
        # one reduction; float64 holds integers exactly
        whole = torch.cat([self._counts_LE.double(), self._sums_LF], 1)
        dist.all_reduce(whole)
        counts_LE = whole[:, : self._counts_LE.shape[1]].long()
        self._figures_LF = whole[:, self._counts_LE.shape[1] :]
        was_taken = norm.isfinite()  # which the host does not know yet
        above_LE = counts_LE * self._num_experts_L1 - counts_LE.sum(1, keepdim=True)
        moves_LE = -self._settings.bias_update_rate * above_LE.sign().float() * was_taken
        for row, bias_E in self._biases.items():
            bias_E += moves_LE[row, : len(bias_E)]
        self._last_LE.copy_(torch.where(was_taken, counts_LE, self._last_LE))

    def state(self) -> dict[str, Tensor]:
        """Return what the next step goes by, besides the biases; it may be filled in place."""
        return {"router.last_counts": self._last_LE} if self._settings.global_loss_weight else {}

    def figures(self) -> dict[str, Tensor]:
        """Return the figures of the last step, the same on all ranks; on the device."""
        counts_LE, sums_LF = self._last_LE, self._figures_LF
        load_L = (counts_LE * self._num_experts_L1).amax(1) / counts_LE.sum(1)
        dead = self._is_expert_LE & (counts_LE == 0)
        entropy_L = sums_LF[:, 1] / sums_LF[:, 0]
        row = {
            "router/load_max_over_mean": load_L.max(),
            "router/dead_experts": dead.sum() / self._is_expert_LE.sum(),
            "router/entropy": sums_LF[:, 1].sum() / sums_LF[:, 0].sum(),
        }
        for column, loss in enumerate(LOSSES, start=2):
            if getattr(self._settings, f"{loss}_weight"):
                row[f"router/{loss}"] = sums_LF[:, column].sum()
        if self._settings.log_layers:
            for number, name in enumerate(self._names):
                row[f"router/load_max_over_mean/{name}"] = load_L[number]
                row[f"router/entropy/{name}"] = entropy_L[number]
                row[f"router/counts/{name}"] = counts_LE[number, : self._sizes[number]]
        return row


def _counts(ids_BSK: Tensor, text_BS: Tensor, *, num: int) -> Tensor:
    """Count in each sequence how often tokens chose each expert; bincount would wait for the
    device."""
    counts_BE = ids_BSK.new_zeros(len(ids_BSK), num)
    each_BSK = text_BS[..., None].expand_as(ids_BSK)
    return counts_BE.scatter_add_(1, ids_BSK.flatten(1), each_BSK.flatten(1))


def _shares(scores_BSE: Tensor) -> Tensor:
    return scores_BSE / (scores_BSE.sum(-1, keepdim=True) + TINY)


def _load(counts: Tensor) -> Tensor:
    """Return counts (..., E) over their mean: 1 where they are even, and where there are none."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts.double() * counts.shape[-1] / total.clamp(min=1), 1.0)
