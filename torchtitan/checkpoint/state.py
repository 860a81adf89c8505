"""The state of a run as the named components of a checkpoint.

model          parameters by name
optimizer      optimizer state of each parameter as `<parameter>.<state>`, e.g. `.exp_avg`; one
               `step` for all parameters whose step counts agree
lr_scheduler   settings of the schedule, only compared: the rate is a function of the step
dataloader     number of the next sample, a fingerprint of the data, a stream's state
train_state    step, tokens seen, the random generators of each rank, other tensors to resume

Names of parameters and of optimizer state do not depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.models.interface import HasParameters
from torchtitan.optim.optimizer import create_state

if TYPE_CHECKING:
    from torchtitan.data.loader import Loader

STEP = "step"
"""State of optimizers that counts the steps of a parameter."""
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
VOCABULARY = (EMBEDDING, OUTPUT)
"""Parameters with a row per token of the vocabulary."""
MODEL_STATE: Mapping[str, str] = {"rope": "interleaved"}
"""State stored with the weights: the row order of wq and wk, which names and shapes do not tell."""


@dataclass(frozen=True, kw_only=True)
class Component:
    """One independently loadable part of a checkpoint."""

    tensors: Mapping[str, Tensor] | None = None
    """DTensors, plain tensors that all ranks hold alike, or tensors of one rank, whose names
    include the rank. A rank may have none. None on all ranks: a component without tensors."""
    state: Mapping[str, Any] | None = None
    """JSON-compatible state, the same on every rank."""


@dataclass(kw_only=True)
class Progress:
    """Progress of training."""

    step: int = 0
    tokens_seen: int = 0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The objects that a checkpoint saves."""

    model: HasParameters
    optimizer: torch.optim.Optimizer
    lr_settings: Mapping[str, Any]
    """Settings from which the learning rate is computed."""
    loader: Loader
    progress: Progress
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """Replicated tensors saved in train_state."""

    def components(self) -> dict[str, Component]:
        """Return the current state. Tensors are not copied."""
        return {
            "model": Component(tensors=model_tensors(self.model), state=MODEL_STATE),
            "optimizer": Component(
                tensors=merge_steps(optimizer_tensors(self.model, self.optimizer))
            ),
            "lr_scheduler": Component(state=self.lr_settings),
            "dataloader": Component(state=self.loader.state_dict()),
            "train_state": Component(
                tensors={**rng_tensors(rank=dist.get_rank()), **self.more},
                state={
                    "step": self.progress.step,
                    "tokens_seen": self.progress.tokens_seen,
                    "world_size": dist.get_world_size(),
                },
            ),
        }


def model_tensors(model: HasParameters) -> dict[str, Tensor]:
    """Return the parameters by name."""
    return {name: p.detach() for name, p in model.named_parameters()}


def optimizer_tensors(model: HasParameters, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state by name; create it if no step was taken yet."""
    trains = any(group["params"] for group in optimizer.param_groups)
    if trains and not optimizer.state:
        create_state(optimizer)
    return {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def merge_steps(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace the step counts of parameters by one `step` if all on all ranks agree. Collective."""
    counts = [t for name, t in tensors.items() if name.endswith(f".{STEP}")]
    bounds = torch.full((2,), -math.inf, dtype=torch.float64)
    if counts:
        low, high = torch.stack([count.detach().double() for count in counts]).aminmax()
        bounds = torch.stack([high, -low]).cpu()
    dist.all_reduce(bounds, dist.ReduceOp.MAX)
    step, is_same = bounds[0].float(), bool(bounds[0] == -bounds[1])
    if not is_same:
        return dict(tensors)
    return {n: t for n, t in tensors.items() if not n.endswith(f".{STEP}")} | {STEP: step}


def rng_tensors(*, rank: int) -> dict[str, Tensor]:
    """Return the states of this rank's random generators; their names include the rank."""
    states = {f"rank_{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rank_{rank}.cuda"] = torch.cuda.get_rng_state()
    return states
