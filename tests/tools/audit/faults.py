"""Mistakes in one layout, planted by a callback: `FAULT` names one of `FAULTS`, as the environment
has it. Each is what a missing or wrong exchange between ranks would do."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torchtitan.models.init import local_part
from torchtitan.trainer import Run

FAULT = "TORCHTITAN_TEST_FAULT"
FFN, ATTENTION = "layers.1.feed_forward", "layers.1.attention"


class Plant:
    """Plants the fault on the ranks of a layout before the first step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_start(self, run: Run) -> None:
        """Plant it."""
        plant, _, _, _ = FAULTS[os.environ[FAULT]]
        plant(run, self._rank)


def _modules(run: Run, name: str) -> list[nn.Module]:
    return [module for part in run.model for n, module in part.named_modules() if n == name]


def scale_gradient(name: str, *, factor: float, only: int | None = None) -> Callable[..., None]:
    """Scale the gradient of a weight, on one rank or all."""

    def plant(run: Run, rank: int) -> None:
        def scale(*of_the_optimizer: Any) -> None:
            for n, p in run.model.named_parameters():
                if n == name and only in (None, rank):
                    assert p.grad is not None
                    local_part(p.grad).mul_(factor)

        run.optimizer.register_step_pre_hook(scale)

    return plant


def change_shard(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    """Change rank 1's part of a weight."""

    @torch.no_grad()
    def plant(run: Run, rank: int) -> None:
        for n, p in run.model.named_parameters():
            if n == name and rank == 1:
                local = local_part(p)
                local.copy_(change(local.clone()))

    return plant


def change_output(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], *, only: int | None = 1
) -> Callable[..., None]:
    """Change what a module returns."""

    def plant(run: Run, rank: int) -> None:
        if only in (None, rank):
            for module in _modules(run, name):
                module.register_forward_hook(lambda module, inputs, output: change(output))

    return plant


def change_gradient(
    name: str, change: Callable[[torch.Tensor, int], torch.Tensor]
) -> Callable[..., None]:
    """Change the gradient of what a module returns, by the number of the call."""

    def plant(run: Run, rank: int) -> None:
        calls = []

        def hook(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            calls.append(len(calls))
            number = calls[-1]
            output.register_hook(lambda grad: change(grad, number))

        for module in _modules(run, name):
            module.register_forward_hook(hook)

    return plant


def shift_labels(run: Run, rank: int) -> None:
    """Take the labels of a shard from one place too far."""
    take = run.sequence_shard.take

    def shifted(samples: Any) -> Any:
        batch = take(samples)
        return replace(batch, labels=batch.labels.roll(1, dims=1))

    if rank == 1:
        run.sequence_shard.take = shifted  # type: ignore[method-assign]


def round_input(name: str) -> Callable[..., None]:
    """Send the stream in bfloat16 to the stage that begins with a block."""

    def plant(run: Run, rank: int) -> None:
        for module in _modules(run, name):
            module.register_forward_pre_hook(
                lambda module, inputs: (inputs[0].bfloat16().float(), *inputs[1:])
            )

    return plant


MOE = ("--model.name=qwen3_moe",)
# layout, options, what is to be found: (plant, layout, options of both, (kind, name))
FAULTS: dict[str, tuple[Callable[..., None], str, tuple[str, ...], tuple[str, str]]] = {
    "fsdp: a rank's gradient counts half": (
        scale_gradient(f"{FFN}.w2.weight", factor=0.5, only=1),
        "fsdp2",
        (),
        ("weight_gradients", f"{FFN}.w2.weight"),
    ),
    "fsdp: a mean for a sum": (
        scale_gradient(f"{ATTENTION}.wq.weight", factor=0.5),
        "fsdp2",
        (),
        ("weight_gradients", f"{ATTENTION}.wq.weight"),
    ),
    "fsdp: a shard is stale": (
        change_shard(f"{ATTENTION}.wk.weight", torch.zeros_like),
        "fsdp2",
        (),
        ("weights", f"{ATTENTION}.wk.weight"),
    ),
    "tp: rows of a shard in another order": (
        change_shard(f"{FFN}.w1.weight", lambda x: x.flip(0)),
        "tp2",
        (),
        ("weights", f"{FFN}.w1.weight"),
    ),
    "tp: a part of the sum is missing": (
        change_output(FFN, lambda x: x * 0.5),
        "tp2",
        (),
        ("outputs", FFN),
    ),
    "tp: gradients of norms are not summed": (
        scale_gradient("layers.1.ffn_norm.weight", factor=0.5),
        "tp2",
        (),
        ("weight_gradients", "layers.1.ffn_norm.weight"),
    ),
    "tp: the stream's gradient is lost on the way": (
        change_gradient(ATTENTION, lambda grad, call: grad * 0.5),
        "tp2",
        (),
        ("gradients", ATTENTION),
    ),
    "cp: labels shifted by one at a shard's border": (
        shift_labels,
        "cp2",
        (),
        ("samples", "labels"),
    ),
    "cp: attention to the own part alone": (
        # still a part of the graph: else the other ranks would wait for it in the backward
        change_output(ATTENTION, lambda x: x * 0.5),
        "cp2",
        (),
        ("outputs", ATTENTION),
    ),
    "cp: gradients of keys are not sent back": (
        change_gradient("layers.1.attention_norm", lambda grad, call: grad * 0.7),
        "cp2",
        (),
        ("gradients", "layers.1.attention_norm"),
    ),
    "pp: the stream is rounded on its way": (
        round_input("layers.4"),
        "pp2",
        (),
        ("outputs", "layers.4.attention_norm"),
    ),
    "pp: the gradient of a microbatch is dropped": (
        change_gradient("layers.3", lambda grad, call: grad * (call != 2)),
        "pp2",
        (),
        ("gradients", "layers.3"),
    ),
    "ep: an expert has another one's weights": (
        change_shard("layers.1.moe.experts.w1", lambda x: x.roll(1, dims=0)),
        "fsdp2,ep2",
        MOE,
        ("weights", "layers.1.moe.experts.w1"),
    ),
    "ep: tokens come back in another order": (
        change_output("layers.1.moe", lambda x: x.roll(1, dims=1)),
        "fsdp2,ep2",
        MOE,
        ("outputs", "layers.1.moe"),
    ),
}
