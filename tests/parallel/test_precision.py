"""bfloat16 on one rank, beside what FSDP2 computes there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.models.fake_group import fake_group
from torchtitan.data.settings import TrainingConfig
from torchtitan.finetune.lora import apply_lora
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.layout import Reshard
from torchtitan.parallel.precision import can_compute_in, compute_in

BF16 = torch.bfloat16
TINY = MODELS["llama3"].flavors["tiny"]
TRAINING = TrainingConfig(mixed_precision_param="bfloat16")
RESHARD = Reshard(after_forward=True, keeps_last=True)
ENDS = ("tok_embeddings.weight", "output.weight")


def built(*, adapted: bool = False) -> Decoder:
    with torch.device("meta"):
        model: Decoder = MODELS["llama3"].build(TINY)
        if adapted:
            apply_lora(
                model, settings=LoRAConfig(rank=4, alpha=8.0, modules=("layers.0.*",)), names={}
            )
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):  # as if trained: zeros would hide what A does
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(2))
    assert model.output is not None
    model.output.loss = build_loss(None)
    return model


def trained(model: nn.Module, *microbatches: int) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of microbatches, and the gradients that they add up to."""
    losses = []
    model.zero_grad()
    for seed in microbatches:
        generator = torch.Generator().manual_seed(seed)
        tokens, labels = torch.randint(0, TINY.vocab_size, (2, 2, 16), generator=generator)
        loss = model(tokens, labels=labels)
        (loss / 64).backward()
        losses.append(loss.item())
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        assert grad is not None
        grads[name] = (grad.to_local() if isinstance(grad, DTensor) else grad).clone()
    return losses, grads


@pytest.mark.promise("bfloat16")
@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "low-rank factors"])
def test_blocks_compute_bit_for_bit_what_they_do_under_fsdp(adapted: bool) -> None:
    """A gradient is rounded to bfloat16 once a microbatch, and they add up in float32.

    FSDP rounds all gradients too, but from torch 2.15 on those of norms, which are computed in
    float32, no more: it lets a weight in bfloat16 have a gradient in the type of the reduction.
    """
    with fake_group(rank=0, world_size=1):
        sharded = built(adapted=adapted)
        apply_fsdp(sharded, mesh=init_device_mesh("cpu", (1,)), training=TRAINING, reshard=RESHARD)
        expected, expected_grads = trained(sharded, 1, 2)
        first, second = (trained(sharded, seed)[1] for seed in (1, 2))
    alone = built(adapted=adapted)
    compute_in(alone, dtype=BF16)
    losses, grads = trained(alone, 1, 2)
    assert losses == expected
    exact_losses, exact = trained(built(adapted=adapted), 1, 2)
    assert losses != exact_losses
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        if name not in ENDS:
            assert torch.equal(grad, first[name].to(BF16).float() + second[name].to(BF16)), name
            assert "norm" in name or torch.equal(grad, expected_grads[name]), name
            continue
        # not rounded to bfloat16 on the way, so no further from what float32 gives
        assert not torch.equal(grad, grad.to(BF16).float())
        torch.testing.assert_close(grad, expected_grads[name], rtol=2**-6, atol=1e-5)
        assert (grad - exact[name]).norm() <= 1.01 * (expected_grads[name] - exact[name]).norm()


def test_parameters_keep_names_and_types_and_logits_are_bfloat16() -> None:
    model, before = built(), dict(built().named_parameters())
    compute_in(model, dtype=BF16)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(after[name], p) for name, p in before.items())
    assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == BF16


@pytest.mark.parametrize("family", MODELS)
def test_every_family_can_be_cast_on_one_rank(family: str) -> None:
    """Biases of experts need no cast, and are no reason to copy every gradient."""
    spec = MODELS[family]
    assert can_compute_in(spec.build_meta(spec.flavors["tiny"]))
