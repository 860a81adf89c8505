"""The loop that `train` compares with, for the library's model and that of transformers.

All loops train the same weights on the same batches with the same optimizer.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan.checkpoint.rows import to_their_rows
from torchtitan.hf.config import new_config
from torchtitan.hf.names import CONFIG, WEIGHTS, Names
from torchtitan.models.decoder import Decoder
from torchtitan.models.spec import EACH, ModelSpec
from torchtitan.parallel.execution import Batch

MAX_NORM = 1.0
# a rate at which the largest model here does not amplify the rounding of its first steps
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build fused AdamW that does not decay norms, as the library does."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
) -> None:
    """Apply FSDP2 to each block and then to the model, over `mesh` or all ranks."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class BareLoop:
    """A loop without a trainer."""

    def __init__(
        self,
        model: nn.Module,
        logits_of: Callable[[nn.Module, Tensor], Tensor],
        *,
        batches: Sequence[Batch],
        autocast: bool,
    ) -> None:
        self._model, self._logits_of, self._batches = model, logits_of, iter(batches)
        self._optimizer = build_optimizer(model)
        self._device = next(model.parameters()).device
        self._autocast = autocast
        self._losses: list[Tensor] = []

    def run(self, num_steps: int) -> None:
        """Take so many steps."""
        for _ in range(num_steps):
            batch = next(self._batches).to(self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                logits_BSV = self._logits_of(self._model, batch.tokens)
            loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch.labels.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        """Return the mean loss over all ranks of each step so far."""
        return mean_over_ranks(torch.stack(self._losses))


def mean_over_ranks(losses: Tensor) -> list[float]:
    """Return the mean of each step's losses over ranks with the same number of tokens."""
    if dist.get_world_size() > 1:
        losses = losses.clone()
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    values: list[float] = losses.tolist()
    return values


def build_theirs(model: Decoder, spec: ModelSpec) -> nn.Module:
    """Build transformers' model of a family with the weights of `model`, for training.

    Raises:
        ImportError: transformers is missing.
    """
    from transformers import AutoModelForCausalLM

    config = new_config(model.config, format=spec.hf, dtype=torch.float32, carried={})
    names = Names(spec.hf, model.config)
    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        rows = to_their_rows(weight, heads=names.rope_heads(name)).contiguous()
        their_name = names.to_hf(name)
        if EACH in their_name:
            weights |= {their_name.replace(EACH, str(i)): x.clone() for i, x in enumerate(rows)}
        else:
            weights[their_name] = rows
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        save_file(weights, Path(folder) / WEIGHTS, metadata={"format": "pt"})
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    theirs.config.use_cache = False
    trained: nn.Module = theirs.to(next(model.parameters()).device).train()
    return trained
