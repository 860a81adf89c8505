"""Load balancing of experts: a bias of the choice, auxiliary losses, and metrics.

Without balancing, a router sends more and more tokens to the experts that learned first. There are
four remedies, each off by default:

**A bias** (arXiv:2408.15664) is added to the experts' scores for the choice only. After each step
it grows by a fixed rate for experts with fewer tokens than the mean, and falls for those with more:

    b_i += rate * sign(mean - n_i),  n_i tokens of expert i in the global batch

It changes no gradient. The counts are integers, summed over all ranks once per step, so that all
layouts that make the same choices have bit-identical biases.

**Losses**, sums over tokens t under the divisor of the model's own loss, N valid labels:

    sequence  w / N * sum_t sum_i f_i s'_ti,  f_i = E n_i / (K S), n_i of the sequence of S tokens
    global    the same, with n_i of the global batch of the previous step
    z         w / N * sum_t logsumexp(logits_t)^2

where s' are the scores of a token divided by their sum. The first is DeepSeek-V3's
(arXiv:2412.19437, 17 to 20), except that choices count as they were made, including the bias. If
ranks split a sequence, its counts are summed over them, and the rest is a sum over the tokens of
any rank. The second follows arXiv:2501.11873: over a global batch experts may specialize, which a
balance within each sequence, or within each rank's few, prevents. The counts of a step are known
only after it, so the counts of the previous step are used. The loss is then a sum over tokens too,
equal for any split of the batch into ranks and microbatches. The third is ST-MoE's
(arXiv:2202.08906). Their gradients join the gradients of the model where the router computes its
weights. The loss of the model does not change, and each auxiliary loss is reported separately.

Only training counts: not forwards without gradients, not the second forward of a recomputed block,
and not padding.

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
from torchtitan.models.interface import Counts, MoELayer, TrainableParams, find_moe_layers
from torchtitan.models.moe import TINY
from torchtitan.optim.settings import RouterConfig

LOSSES = ("sequence_loss", "global_loss", "z_loss")
FIGURES = ("tokens", "entropy", *LOSSES)


def check_balance(settings: RouterConfig, *, model: nn.Module) -> None:
    """Raise ConfigError unless the model has the experts, and their bias, that are needed."""
    routes = find_moe_layers(model).values()
    default = RouterConfig()
    changed = [key for key, value in vars(default).items() if getattr(settings, key) != value]
    if changed and not routes:
        keys = tuple(f"router.{key}" for key in changed)
        raise ConfigError.at((*keys, "model.name"), "needs a model with experts; remove it")
    if settings.bias_update_rate and all(route.expert_bias is None for route in routes):
        raise ConfigError.at(
            ("router.bias_update_rate", "model.expert_bias"),
            "needs a model whose experts have a bias; write model.expert_bias = true, or remove it",
        )


def build_balance(
    settings: RouterConfig,
    *,
    parts: Iterable[nn.Module],
    counts: Counts,
    trained: TrainableParams,
    mesh: Mesh,
    device: torch.device,
) -> Balance:
    """Build the load balancing of this rank's parts of a model with experts.

    Biases that are not trained are not updated.
    """
    routes = {name: route for part in parts for name, route in find_moe_layers(part).items()}
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
    """Counts the choices of routers, updates their biases, and adds auxiliary losses.

    `routes` are this rank's mixtures of experts by name, possibly none; `frozen` names those whose
    bias is not updated. To cover this rank's sequences, counts are summed over `groups`, one after
    another. `tp` is this rank's index in its tensor parallel group, which splits the same
    sequences, and the group's size.
    """

    def __init__(
        self,
        settings: RouterConfig,
        *,
        routes: Mapping[str, MoELayer],
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
        self._last_LE = self._counts_LE.clone()  # of all ranks, in the last step not skipped
        self._sums_LF = torch.zeros(
            len(self._sizes), len(FIGURES), dtype=torch.float64, device=device
        )
        self._reported_LE, self._figures_LF = self._counts_LE.clone(), self._sums_LF.clone()
        self._divisor = torch.ones((), device=device)
        self._is_new = False
        self._tp, self._is_text = tp, None
        self._num_seen: Counter[int] = Counter()
        self._counted = WeakTensorKeyDictionary()  # by the tensor of choices, while it exists
        rows = {name: self._names.index(name) for name in routes}
        for name, route in routes.items():
            route.router.on_choice = partial(self._count, rows[name])
            if any(getattr(settings, f"{loss}_weight") for loss in LOSSES):
                route.router.extra_loss = partial(self._loss, rows[name])
        moved = {name: route for name, route in routes.items() if name not in frozen}
        biases = {rows[name]: route.expert_bias for name, route in moved.items()}
        self._biases = {row: bias for row, bias in biases.items() if bias is not None}

    def begin(self, divisor: Tensor, *, is_text: Sequence[Tensor | None] = ()) -> None:
        """Start a step.

        `divisor` is the number of valid labels that losses are divided by. `is_text` says whether
        each token of this rank is no padding, bool (B, S) per batch; None: all tokens.
        """
        self._divisor = divisor
        masks = [batch for batch in is_text if batch is not None]
        self._is_text = self._own_part(torch.cat(masks)) if masks else None
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
        """Return 1 for each token that counts, of the next batch of a layer, (B, S)."""
        if self._is_text is None:
            return torch.ones_like(ids_BSK[..., 0])
        start = self._num_seen[row]
        self._num_seen[row] += len(ids_BSK)
        return self._is_text[start : start + len(ids_BSK)].long()

    @torch.no_grad()
    def _count(self, row: int, scores_BSE: Tensor, ids_BSK: Tensor) -> None:
        """Count the choices of a layer's tokens."""
        text_BS = self._next_text(row, ids_BSK)
        # a recomputed block computes its losses again, with the same tensor
        self._counted[ids_BSK] = text_BS
        num = self._counts_LE.shape[1]
        self._counts_LE[row] += _counts(ids_BSK, text_BS, num=num).sum(0)
        self._sums_LF[row, 0] += text_BS.sum()
        shares_BSE = _shares(scores_BSE)  # special.entr would be compiled at its first use on a GPU
        self._sums_LF[row, 1] -= (torch.xlogy(shares_BSE, shares_BSE).sum(-1) * text_BS).sum()
        self._is_new = True

    def _loss(self, row: int, logits_BSE: Tensor, scores_BSE: Tensor, ids_BSK: Tensor) -> Tensor:
        """Return the auxiliary losses of a layer for this rank's tokens."""
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
        if self._is_new:  # a recomputed block does not choose again
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
        """End a step on all ranks. Update the biases unless it was skipped: if `norm` is finite."""
        # one reduction; float64 holds integers exactly
        whole = torch.cat([self._counts_LE.double(), self._sums_LF], 1)
        dist.all_reduce(whole)
        counts_LE = whole[:, : self._counts_LE.shape[1]].long()
        self._reported_LE, self._figures_LF = counts_LE, whole[:, self._counts_LE.shape[1] :]
        was_taken = norm.isfinite()  # on the device: the host does not know it yet
        above_LE = counts_LE * self._num_experts_L1 - counts_LE.sum(1, keepdim=True)
        moves_LE = -self._settings.bias_update_rate * above_LE.sign().float() * was_taken
        for row, bias_E in self._biases.items():
            bias_E += moves_LE[row, : len(bias_E)]
        self._last_LE.copy_(torch.where(was_taken, counts_LE, self._last_LE))

    def state(self) -> dict[str, Tensor]:
        """Return the state for checkpoints besides the biases. It may be filled in place."""
        return {"router.last_counts": self._last_LE} if self._settings.global_loss_weight else {}

    def figures(self) -> dict[str, Tensor]:
        """Return the metrics of the last step, skipped or not, equal on all ranks."""
        counts_LE, sums_LF = self._reported_LE, self._figures_LF
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
    """Count the choices of each expert per sequence. (bincount would wait for the device.)"""
    counts_BE = ids_BSK.new_zeros(len(ids_BSK), num)
    each_BSK = text_BS[..., None].expand_as(ids_BSK)
    return counts_BE.scatter_add_(1, ids_BSK.flatten(1), each_BSK.flatten(1))


def _shares(scores_BSE: Tensor) -> Tensor:
    return scores_BSE / (scores_BSE.sum(-1, keepdim=True) + TINY)


def _load(counts: Tensor) -> Tensor:
    """Return counts (..., E) over their mean. They are 1 if all are equal, or all are 0."""
    total = counts.sum(-1, keepdim=True)
    return torch.where(total > 0, counts.double() * counts.shape[-1] / total.clamp(min=1), 1.0)
