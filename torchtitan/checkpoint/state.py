"""Between a run and the named components of its checkpoint.

model          every parameter under its name
optimizer      every parameter's optimizer state under `<parameter>.<state>`, e.g. `.exp_avg`
lr_scheduler   the settings of the schedule; the rate itself is a function of the step
dataloader     the number of samples consumed, and what data they came from
train_state    the step, the tokens seen, each rank's random generators, and what else goes on

Names come from the model alone: nothing here depends on the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.checkpoint.storage import Component
from torchtitan.models.parts import HasParameters
from torchtitan.optim.state import create_state

COMPONENTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
VOCABULARY = (EMBEDDING, OUTPUT)
"""Parameters with a row for each token of the vocabulary."""
MODEL_STATE: Mapping[str, str] = {"rope": "interleaved"}
"""Stored beside the weights: the order of the rows of wq and wk, which follows from neither names
nor shapes."""


class Resumable(Protocol):
    """Something that carries its own resume state, as JSON can hold it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        ...


@dataclass(kw_only=True)
class Progress:
    """How far the training is."""

    step: int = 0
    tokens_seen: int = 0


@dataclass(frozen=True, kw_only=True)
class RunState:
    """All that a checkpoint saves of a run."""

    model: HasParameters
    optimizer: torch.optim.Optimizer
    lr_settings: Mapping[str, Any]
    """All that the learning rate is computed from."""
    loader: Resumable
    progress: Progress
    more: Mapping[str, Tensor] = field(default_factory=dict)
    """What else goes on where it was, in train_state: tensors that all ranks hold alike."""

    def components(self) -> dict[str, Component]:
        """Return the run's state as it is now; the tensors are the run's own, not copies."""
        return {
            "model": Component(tensors=model_tensors(self.model), state=MODEL_STATE),
            "optimizer": Component(tensors=optimizer_tensors(self.model, self.optimizer)),
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
    """Return the optimizer's state by parameter name, made first where no step was taken yet."""
    trains = any(group["params"] for group in optimizer.param_groups)
    if trains and not optimizer.state:
        create_state(optimizer)
    return {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def rng_tensors(*, rank: int) -> dict[str, Tensor]:
    """Return the states of this rank's random generators, by names that hold the rank."""
    states = {f"rank_{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rank_{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def set_rng(states: Mapping[str, Tensor]) -> None:
    """Give this rank's random generators the states that `rng_tensors` returned, or some."""
    setters = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
    for name, state in states.items():
        setters[name.rpartition(".")[2]](state)
