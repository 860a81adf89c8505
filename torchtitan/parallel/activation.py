"""Activation checkpointing: recompute a block in backward instead of keeping what it computed.

It changes memory and time, never a number. `full` does so for every block, `selective` for every
n-th one. Blocks keep their type and their parameters their names: only `forward` is replaced.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import nn
from torch.utils.checkpoint import checkpoint

Mode = Literal["none", "full", "selective"]


def apply_activation_checkpointing(model: nn.Module, *, mode: Mode, every: int) -> None:
    """Recompute blocks of `model` in backward: all (`full`) or each `every`-th (`selective`)."""
    if mode == "none":
        return
    stride = 1 if mode == "full" else every
    for name, block in model.layers.items():
        if int(name) % stride == 0:  # its number in the whole model, whatever the stage
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
