"""Recomputation changes no number and no name, and takes place where it was asked for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize, local_part
from torchtitan.parallel.activation import Mode, apply_activation_checkpointing

PRODUCT = "aten::mm"
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def tiny(num_layers: int = 2) -> Decoder:
    sizes = replace(MODELS["llama3"].flavors["tiny"], num_layers=num_layers)
    model = MODELS["llama3"].build(sizes)
    initialize(model, seed=0)
    return model


def gradients(model: Decoder) -> dict[str, Tensor]:
    tokens = torch.arange(24).view(2, 12)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.promise("compile")
@pytest.mark.parametrize(
    ("mode", "option", "recomputed"),
    [
        ("none", "1", []),
        ("full", "2", ["0", "1"]),
        ("full", "op", ["0", "1"]),
        ("selective", "1", ["0", "1"]),
        ("selective", "2", ["0"]),
        ("selective", "op", ["0", "1"]),
    ],
)
def test_gradients_stay_and_the_right_blocks_run_twice(
    mode: Mode, option: str, recomputed: list[str]
) -> None:
    plain, model = tiny(), tiny()
    calls: list[str] = []
    for name, block in model.layers.items():
        block.attention.register_forward_hook(lambda *_, name=name: calls.append(name))
    apply_activation_checkpointing(model, mode=mode, option=option)
    expected, got = gradients(plain), gradients(model)
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert sorted(calls) == sorted(["0", "1", *recomputed])


# --- which operators run again, and what is kept


class Watch(TorchDispatchMode):
    """Counts what runs, and knows which of the memory that it made is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with this rank's parts
        result = func(*args, **(kwargs or {}))
        self.calls[func._schema.name] += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def bytes_held(self, *, but: nn.Module) -> int:
        """All but what a module's parameters take, of which views were made."""
        own = {local_part(p).untyped_storage()._cdata for p in but.parameters()}
        made = (found for key, found in self._made.items() if key not in own)
        return sum(size for storage, size in made if not storage.expired())


def watched_step(mode: Mode, option: str) -> tuple[Counter[str], int]:
    """What backward runs, and the bytes that forward leaves behind for it."""
    model = tiny()
    apply_activation_checkpointing(model, mode=mode, option=option)
    tokens = (torch.arange(2 * 512) % 263).view(2, 512)
    with Watch() as watch:
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum")
        held, forward = watch.bytes_held(but=model), Counter(watch.calls)
        loss.backward()
    return watch.calls - forward, held


@pytest.mark.promise("counted-messages")
def test_by_operator_the_dear_ones_are_kept() -> None:
    """Of seven products of a block three run again: wq, wv and w1; w2 is behind the last input."""
    plain, held_by_none = watched_step("none", "1")
    every, held_by_full = watched_step("full", "1")
    some, held_by_op = watched_step("selective", "op")
    assert (plain[PRODUCT], plain[ATTENTION]) == (2 * (2 * 7 + 1), 0)
    assert (every[PRODUCT] - plain[PRODUCT], every[ATTENTION]) == (2 * 6, 2)
    assert (some[PRODUCT] - plain[PRODUCT], some[ATTENTION]) == (2 * 3, 0)
    config = MODELS["llama3"].flavors["tiny"]
    # wk, wo and w3, attention and its log-sum-exp
    widths = (16, config.dim, config.hidden_dim, config.dim, config.num_heads)
    assert held_by_op - held_by_full == 2 * 4 * 1024 * sum(widths)
    assert held_by_full < held_by_op < held_by_none


# --- random numbers, and arguments of other blocks


class Noisy(nn.Module):
    """A block that draws random numbers, between two products, and takes an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, size: float, *, rate: float) -> Tensor:
        return x + size * self.second(F.dropout(F.gelu(self.first(x)), rate))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({str(i): Noisy() for i in range(3)})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x, 0.5, rate=0.4)
        return x


@pytest.mark.parametrize(("mode", "option"), [("full", "1"), ("selective", "op")])
def test_random_numbers_are_the_same_again(mode: Mode, option: str) -> None:
    plain, model = Stack(), Stack()
    apply_activation_checkpointing(model, mode=mode, option=option)
    found = []
    for stack in (plain, model):
        torch.manual_seed(1)
        stack(torch.ones(4, 8)).square().sum().backward()
        found.append([*(p.grad for p in stack.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], torch.zeros(8, 8))
