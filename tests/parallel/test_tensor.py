"""The plan, the refusals, and what a rank of a split model holds and passes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.models.fake_group import fake_group
from torchtitan.data.settings import TrainingConfig
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.models.sizes import DecoderConfig, MoEConfig
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.layout import Reshard
from torchtitan.parallel.tensor import (
    _matches,
    apply_tensor_parallel,
)

LLAMA3 = MODELS["llama3"]
TINY8 = LLAMA3.flavors["tiny8"]
# what tensor parallelism leaves divides by 3, 5 and 7 nowhere
UNEVEN = replace(TINY8, num_layers=1, dim=16, hidden_dim=40, vocab_size=268)


def split(
    model: Decoder, *, tp: int, fsdp: int = 1, sequence: bool = True, loss: bool = True
) -> None:
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    if model.output is not None:
        model.output.loss = build_loss(mesh["tp"].get_group() if loss else None)
    apply_tensor_parallel(
        model,
        mesh=mesh["tp"],
        plan=LLAMA3.tensor_plan,
        sequence_parallel=sequence,
        loss_parallel=loss,
    )
    if fsdp > 1:
        training = TrainingConfig(mixed_precision_param="float32")
        reshard = Reshard(after_forward=True, keeps_last=True)
        apply_fsdp(model, mesh=mesh["fsdp"], training=training, reshard=reshard)


def meta_model(config: DecoderConfig) -> Decoder:
    with torch.device("meta"):
        return LLAMA3.build(config)


@pytest.mark.promise("tp")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_every_entry_of_the_plan_is_a_module_and_every_parameter_has_one(
    family: str, tied: bool
) -> None:
    spec = MODELS[family]
    with torch.device("meta"):
        model = spec.build(replace(spec.flavors["tiny8"], tie_embeddings=tied))
    names = [name for name, _ in model.named_modules()]
    for pattern in spec.tensor_plan:
        found = [name for name in names if _matches(name, pattern)]
        if not issubclass(spec.sizes, MoEConfig):  # there layers differ, and sizes of a family
            assert len(found) == (TINY8.num_layers if "*" in pattern else 1), pattern
    for name, _ in model.named_parameters():
        module = name.rpartition(".")[0]
        entries = [p for p in spec.tensor_plan if _matches(module, p)]
        assert len(entries) == 1, name


ROWS = ("tok_embeddings", "wq", "wk", "wv", "w1", "w3", "output")
COLUMNS = ("wo", "w2")


def expected_part(
    name: str, whole: Tensor, *, tp: tuple[int, int], fsdp: tuple[int, int]
) -> Tensor:
    """Cut by hand: the tp part first, then rows for FSDP, the last ranks' fewer or none."""
    module = name.split(".")[-2]
    if module in ROWS:
        whole = whole.chunk(tp[1])[tp[0]]
    elif module in COLUMNS:
        whole = whole.chunk(tp[1], dim=1)[tp[0]]
    pieces = whole.chunk(fsdp[1])
    return pieces[fsdp[0]] if fsdp[0] < len(pieces) else whole[:0]


@pytest.mark.promise("initial-weights")
@pytest.mark.parametrize(
    ("fsdp", "tp", "tied"),
    [(1, 4, False), (2, 2, True), (3, 2, False), pytest.param(7, 2, True, marks=pytest.mark.slow)],
)
def test_each_rank_holds_its_part_and_starts_from_the_bits_of_one_device(
    fsdp: int, tp: int, tied: bool
) -> None:
    config = replace(UNEVEN, tie_embeddings=tied)
    alone = LLAMA3.build(config)
    initialize(alone, seed=3)
    num_empty = 0
    for rank in range(fsdp * tp):
        with fake_group(rank=rank, world_size=fsdp * tp):
            model = meta_model(config)
            split(model, tp=tp, fsdp=fsdp)
            model.to_empty(device="cpu")
            initialize(model, seed=3)
            for (name, p), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
                assert isinstance(p, DTensor)
                part = expected_part(name, whole, tp=(rank % tp, tp), fsdp=(rank // tp, fsdp))
                assert torch.equal(p.to_local(), part), name
                num_empty += part.numel() == 0
    assert (num_empty > 0) == (fsdp in (3, 7))


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_take_and_return_plain_local_tensors(sequence: bool, loss: bool, tied: bool) -> None:
    config = replace(TINY8, num_layers=2, tie_embeddings=tied)
    tokens, positions = torch.zeros(3, 16, dtype=torch.int64), torch.arange(16)
    with fake_group(rank=1, world_size=4):
        first, last = LLAMA3.build(config), LLAMA3.build(config)
        first.prune_to_stage({"tok_embeddings", "layers.0"})
        last.prune_to_stage({"layers.1", "norm", "output"})
        for stage in (first, last):
            split(stage, tp=4, sequence=sequence, loss=loss)
        stream = first(tokens)
        assert type(stream) is Tensor
        assert stream.shape == (3, 4 if sequence else 16, config.dim)
        summed = last(stream, positions, labels=tokens)
        assert type(summed) is Tensor
        assert summed.shape == ()
        summed.backward()
        assert all(p.grad is not None for p in first.parameters())


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with this rank's part
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.found = max(self.found, *sizes, 0)
        return result


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("fsdp", [1, 2])
def test_no_rank_makes_a_gradient_of_the_whole_vocabulary(fsdp: int, sequence: bool) -> None:
    tp, vocab_size = 4, 4096
    config = replace(TINY8, num_layers=1, vocab_size=vocab_size)
    tokens = torch.arange(8).view(1, 8)
    with fake_group(rank=1, world_size=fsdp * tp):
        model = LLAMA3.build(config)
        model.prune_to_stage({"tok_embeddings", "layers.0"})
        split(model, tp=tp, fsdp=fsdp, sequence=sequence)
        with Largest() as largest:
            model(tokens).sum().backward()
        gradient = model.tok_embeddings.weight.grad
        assert gradient.to_local().shape == (vocab_size // tp // fsdp, config.dim)
        assert largest.found == vocab_size // tp * config.dim
