"""Muon: the iteration, who does which work, and the update against torch's own on one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.distributed.rank_pool import RankPool
from tests.test_host_waits import Waits
from torchtitan.optim.muon import Muon, orthogonalize
from torchtitan.optim.optimizer import build_optimizer, optimizer_step, supports_found_inf
from torchtitan.optim.settings import OptimizerConfig

SETTINGS = OptimizerConfig(name="Muon", lr=0.02, weight_decay=0.3, muon_excluded_params=("emb*",))
SHAPES = {"wide": (6, 14), "tall": (13, 6), "square": (8, 8), "experts": (3, 6, 5), "emb": (9, 4)}
SHAPES |= {"norm": (7,)}
STEPS = 4


@pytest.mark.promise("optimizers")
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6)])
def test_singular_values_come_near_one_and_their_vectors_stay(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, *shape)
    result = orthogonalize(batch)
    u, s, vh = torch.linalg.svd(batch, full_matrices=False)
    along = u.mT @ result @ vh.mT
    assert ((along.diagonal(dim1=1, dim2=2) - 1).abs() < 0.35)[s > 0.1].all()
    torch.testing.assert_close(
        along, along.diagonal(dim1=1, dim2=2).diag_embed(), atol=2e-4, rtol=0
    )
    for matrix, one in zip(batch, result, strict=True):
        torch.testing.assert_close(orthogonalize(matrix), one, atol=1e-5, rtol=0)


@contextmanager
def in_float32() -> Iterator[None]:
    """Let torch's optimizer not round the momentum to bfloat16."""
    to = Tensor.to

    def keep(x: Tensor, *args: Any, **settings: Any) -> Tensor:
        if settings.get("dtype") == torch.bfloat16:
            return x.clone()
        return to(x, *args, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "bfloat16", Tensor.clone)
        patch.setattr(Tensor, "to", keep)  # torch 2.15
        yield


def model(like: dict[str, Tensor]) -> nn.Module:
    holder = nn.Module()
    for name, value in like.items():
        holder.register_parameter(name, nn.Parameter(value.clone()))
    return holder


def values(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def by_torch(dtype: torch.dtype) -> dict[str, Tensor]:
    """Torch's Muon and AdamW side by side; each expert is a parameter."""
    whole = values(0)
    experts = {f"experts.{i}": whole["experts"][i] for i in range(SHAPES["experts"][0])}
    flat = {k: nn.Parameter(v.clone()) for k, v in {**whole, **experts}.items() if k != "experts"}
    muon = torch.optim.Muon(
        [p for name, p in flat.items() if name not in ("emb", "norm")],
        lr=0.02,
        weight_decay=0.3,
        adjust_lr_fn="match_rms_adamw",
    )
    groups = [{"params": [flat["emb"]]}, {"params": [flat["norm"]], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), weight_decay=0.3)
    with in_float32() if dtype == torch.float32 else nullcontext():
        for step in range(1, STEPS + 1):
            gradients = values(step)
            for name, p in flat.items():
                first, _, index = name.partition(".")
                p.grad = gradients[first][int(index)] if index else gradients[first]
            muon.step()
            adamw.step()
    stacked = torch.stack([flat.pop(name).detach() for name in experts])
    return {name: p.detach() for name, p in flat.items()} | {"experts": stacked}


def alone(dtype: torch.dtype) -> dict[str, Tensor]:
    holder = model(values(0))
    optimizer = build_optimizer(holder, settings=SETTINGS, dtype=dtype)
    for step in range(1, STEPS + 1):
        gradients = values(step)
        for name, p in holder.named_parameters():
            p.grad = gradients[name]
        optimizer.step()
    return {name: p.detach() for name, p in holder.named_parameters()}


@pytest.mark.promise("optimizers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_device_agrees_with_torch(dtype: torch.dtype, ranks: RankPool) -> None:
    """In both types of the iteration: they are 1e-3 apart."""
    [result] = ranks.run(alone, dtype, world=1)
    expected = by_torch(dtype)
    assert result.keys() == expected.keys()
    for name, value in result.items():
        torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6)


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


def skip_steps(kinds: str) -> list[dict[str, Tensor]]:
    """Train with steps to be left out between others; return the weights and state after each.

    Args:
        kinds: "." for a step, "x" for one with gradients and a norm that are not finite.
    """
    holder = model(values(0))
    optimizer = build_optimizer(holder, settings=SETTINGS)
    assert supports_found_inf(optimizer, device=torch.device("cpu"))
    waits, seen, step = Waits(), [], 0
    for kind in kinds:
        step += kind == "."
        for name, p in holder.named_parameters():
            p.grad = values(step)[name] if kind == "." else torch.full_like(p, torch.nan)
        with waits.counting():
            optimizer_step(optimizer, norm=torch.tensor(1.0 if kind == "." else torch.inf))
        seen.append({name: p.detach().clone() for name, p in holder.named_parameters()})
        for name, p in holder.named_parameters():
            state = optimizer.state[p].items()
            seen[-1] |= {f"{name}.{key}": value.clone() for key, value in state}
    assert waits.num_waits == 0
    return seen


@pytest.mark.promise("not-finite")
def test_a_step_left_out_changes_no_bit_and_the_host_does_not_wait(ranks: RankPool) -> None:
    [plain] = ranks.run(skip_steps, "...", world=1)
    [skipped] = ranks.run(skip_steps, "x.x..x", world=1)
    assert "emb.step" in plain[0]
    assert "wide.momentum_buffer" in plain[0]
    for found, wanted in zip(
        skipped, [skipped[0], *(plain[i] for i in (0, 0, 1, 2, 2))], strict=True
    ):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            assert bits(value).equal(bits(found[name])), name
    for name, value in values(0).items():
        assert bits(skipped[0][name]).equal(bits(value))
        assert not skipped[0].get(f"{name}.step", torch.zeros(1)).any()


PLACED: dict[str, tuple[Placement, Placement]] = {
    "wide": (Replicate(), Shard(0)),
    "tall": (Shard(0), Shard(1)),
    "square": (Replicate(), Replicate()),
    "experts": (Shard(0), Shard(1)),
    "emb": (Shard(0), Replicate()),
    "norm": (Replicate(), Shard(0)),
}


def spread() -> tuple[dict[str, Tensor], Counter[int], list[tuple[str, int | None]]]:
    """All kinds of shards, uneven and empty ones too, on 2 x 2 ranks.

    Return the weights, what this rank sends to each other one in a step, and what it owns.
    """
    mesh = init_device_mesh("cpu", (2, 2))

    def lay(step: int) -> dict[str, Tensor]:
        return {
            name: distribute_tensor(value, mesh, PLACED[name], src_data_rank=None)
            for name, value in values(step).items()
        }

    holder = model(lay(0))
    optimizer = build_optimizer(holder, settings=SETTINGS)
    assert isinstance(optimizer, Muon)
    sent: Counter[int] = Counter()
    correct = dist.all_to_all_single

    def counting(received: Tensor, given: Tensor, of: list[int], to: list[int]) -> None:
        sent.update({rank: n for rank, n in enumerate(to) if rank != dist.get_rank()})
        correct(received, given, of, to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        for step in range(1, STEPS + 1):
            gradients = lay(step)
            for name, p in holder.named_parameters():
                p.grad = gradients[name]
            optimizer.step()
    whole = {name: p.detach().full_tensor() for name, p in holder.named_parameters()}
    return whole, sent, [(m.name, m.index) for m in optimizer.own]


@pytest.mark.promise("optimizers")
def test_any_shards_are_updated_as_on_one_device(ranks: RankPool) -> None:
    results = ranks.run(spread, world=4)
    expected = by_torch(torch.float32)
    for result, _, _ in results:
        for name, value in result.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-6)
            assert torch.equal(value, results[0][0][name])
    owned = [one for _, _, own in results for one in own]
    assert len(owned) == len(set(owned)) == 3 + SHAPES["experts"][0]


@pytest.mark.promise("counted-messages")
def test_a_step_sends_what_the_page_says(ranks: RankPool) -> None:
    """Elements to others: a part that the owner lacks comes once, each part but its own goes out.

    `square`, the dearest, is rank 0's: nothing comes, all of it goes to three. `wide` is rank 1's:
    half comes, half goes to three. `tall` is rank 2's, which has 6 x 3 of it: the rest comes and
    goes. An expert lies on two ranks: half comes and goes.
    """
    sent = sum((counted for _, counted, _ in ranks.run(spread, world=4)), Counter())
    square, wide, tall = 8 * 8 * 3, 6 * 14 * (1 / 2 + 3 / 2), 2 * (13 * 6 - 6 * 3)
    experts = 3 * 6 * 5 * (1 / 2 + 1 / 2)
    assert sum(sent.values()) / STEPS == square + wide + tall + experts
