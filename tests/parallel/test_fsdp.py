"""How often weights are gathered, and among how many ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.fake_group import fake_group
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.activation import apply_activation_checkpointing
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.layout import find_reshard

FAMILIES = {"dense": "llama3", "experts": "qwen3_moe"}
TINY8 = MODELS["llama3"].flavors["tiny8"]
RANKS = 4


class Gathers(TorchDispatchMode):
    """Counts gathers by the elements that come together and the ranks that they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> Any:
        if func.name() == "c10d::_allgather_base_":
            whole, part = (tensor.numel() for tensor in args[:2])
            self.found[whole, whole // part] += 1
        return func(*args, **kwargs)


def gathered(parameter: torch.Tensor) -> int:
    """The elements that come of a parameter whose rows are filled up to be shared evenly."""
    return parameter.numel() // len(parameter) * RANKS * -(-len(parameter) // RANKS)


def gathers(
    asked: str,
    *,
    kind: str = "dense",
    shape: tuple[int, ...] = (RANKS,),
    tied: bool = False,
    recomputes: bool = False,
) -> tuple[Counter[tuple[int, int]], dict[str, int]]:
    """The gathers of a step, and the sizes of what is gathered."""
    spec = MODELS[FAMILIES[kind]]
    with torch.device("meta"):
        model: Decoder = spec.build(replace(spec.flavors["tiny8"], tie_embeddings=tied))
    last = dict(model.layers["7"].named_parameters())
    sizes = {
        "block": sum(gathered(p) for name, p in last.items() if ".experts." not in name),
        "experts": sum(gathered(p) for name, p in last.items() if ".experts." in name),
        "first": sum(gathered(p) for p in model.layers["0"].parameters()),
        "embedding": TINY8.vocab_size * TINY8.dim,
        "head": TINY8.vocab_size * TINY8.dim + TINY8.dim,
    }
    assert model.output is not None
    model.output.loss = build_loss(None)
    apply_activation_checkpointing(model, mode="full" if recomputes else "none", option="")
    dims = ParallelDims(dp_shard=shape[-1], dp_replicate=RANKS // shape[-1])
    training = TrainingConfig(mixed_precision_param="float32")
    reshard = find_reshard(ParallelismConfig(fsdp_reshard_after_forward=asked), dims=dims)
    with fake_group(rank=0, world_size=RANKS), Gathers() as seen:
        names = ("dp_replicate", "fsdp")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        apply_fsdp(model, mesh=mesh, training=training, reshard=reshard)
        model.to_empty(device="cpu")
        initialize(model, seed=0)
        seen.found.clear()
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        for _ in range(2):  # a second step must find what the first one left as it was
            model(tokens, labels=tokens).backward()
    assert all(number % 2 == 0 for number in seen.found.values())
    return Counter({key: number // 2 for key, number in seen.found.items()}), sizes


@pytest.mark.promise("counted-messages")
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(
    ("asked", "by_all", "by_two"),
    [("default", 15, 0), ("always", 16, 0), ("never", 8, 0), ("2", 8, 7)],
)
def test_each_block_is_gathered_as_often_as_is_said(
    asked: str, by_all: int, by_two: int, recomputes: bool
) -> None:
    found, sizes = gathers(asked, recomputes=recomputes)
    expected = {(sizes["block"], RANKS): by_all, (sizes["block"], 2): by_two}
    expected |= {(sizes["embedding"], RANKS): 1, (sizes["head"], RANKS): 1}
    assert found == Counter(expected)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("asked", "times"), [("default", 13), ("always", 14), ("never", 7)])
def test_experts_are_gathered_as_often_as_their_blocks(
    asked: str, times: int, recomputes: bool
) -> None:
    """Seven of them behind a dense block; what a block that is recomputed finds is there."""
    found, sizes = gathers(asked, kind="experts", recomputes=recomputes)
    expected = {(sizes["block"], RANKS): times, (sizes["experts"], RANKS): times}
    expected |= {(sizes["first"], RANKS): 1 if asked == "never" else 2}
    expected |= {(sizes["embedding"], RANKS): 1, (sizes["head"], RANKS): 1}
    assert found == Counter(expected)


@pytest.mark.promise("counted-messages")
def test_a_tied_embedding_is_gathered_once_with_the_last_norm() -> None:
    found, sizes = gathers("default", tied=True)
    assert found == {(sizes["block"], RANKS): 15, (sizes["head"], RANKS): 1}
