"""DeepSeek-V3 trains alike in every layout: latent attention, shared experts, groups, a bias.

As for Qwen3's experts, whose tests have all layouts: the first of four layers is dense, and
gradients of every parameter are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.pipeline_jobs import TINY8, pipeline
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_experts import ADAPTER, CHUNKS, SHORT, WITHIN, ep
from tests.distributed.test_matrix import COPIED, HOW, TP2, cp
from torchtitan.models import deepseek_v3
from torchtitan.models.init import Init, Normal
from torchtitan.models.sizes import DecoderConfig
from torchtitan.parallel import tensor
from torchtitan.parallel.copies import Copied, Shared, wrapped

DEEPSEEK = TINY8.replace("[model]", '[model]\nname = "deepseek_v3"')

# ranks, samples of a rank and microbatch, what is trained, where and how
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...], tuple[str, ...]]] = {
    "one device, accumulating, recomputed": (1, 2, (), HOW["recomputed"]),
    "fsdp 2, compiled": (2, 4, (), HOW["compiled"]),
    "fsdp 2, by operator": (2, 4, (), HOW["by operator"]),
    "hsdp 2x2": (4, 2, (), jobs.HSDP),
    "cp 2, ring, recomputed": (2, 8, (), (*cp(2, "ring"), *HOW["recomputed"])),
    "cp 2, ulysses, documents": (2, 8, WITHIN, cp(2, "ulysses")),
    "cp 2, allgather, fsdp 2": (4, 4, (), cp(2, "allgather")),
    "pp 2, recomputed": (2, 4, (), (*pipeline("1F1B"), *HOW["recomputed"])),
    "pp 2 ZBV, ep 2": (4, 4, (), (*pipeline("ZBVZeroBubble"), ep(2))),
    "ep 2, odd tokens": (2, 4, CHUNKS, (ep(2),)),
    "tp 2": (2, 8, (), (TP2,)),
    "tp 2, compiled": (2, 8, (), (TP2, *HOW["compiled"])),
    "tp 2, stream copied, recomputed": (2, 8, (), (TP2, COPIED, *HOW["recomputed"])),
    "tp 2, fsdp 2, by operator": (4, 4, (), (TP2, *HOW["by operator"])),
    "tp 2, adapters": (2, 8, ADAPTER, (TP2,)),
    "tp 2, stream copied, adapters": (2, 8, ADAPTER, (TP2, COPIED)),
    "tp 2, cp 2, ep 2, documents": (4, 8, WITHIN, (TP2, *cp(2, "ring"), ep(2))),
    "tp 2, pp 2, ep 2": (4, 8, (), (TP2, *pipeline("Interleaved1F1B"), ep(2))),
    "ep 4, cp 2, fsdp 2": (4, 4, (), (*cp(2, "ring"), ep(4))),
}


@contextmanager
def strong_experts() -> Iterator[None]:
    """Let experts, routers, biases and latents start so large that they matter."""
    correct = deepseek_v3.initial

    def initial(config: DecoderConfig, name: str) -> Init:
        if ".moe." in name:
            return Normal(std=0.3)
        return Normal(std=0.2) if ".attention.w" in name else correct(config, name)

    deepseek_v3.initial = initial
    try:
        yield
    finally:
        deepseek_v3.initial = correct


def train(job: list[str], *, evaluating: bool = False) -> pj.Trained:
    with strong_experts():
        return pj.train(job, evaluating=evaluating)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    world, size, what, how = LAYOUTS[layout]
    evaluating = world > 1 and "compiled" not in layout
    reference = on_one_device(train, *SHORT, *what, toml=DEEPSEEK, evaluating=evaluating)
    job = [*jobs.write_job(tmp_path, DEEPSEEK, cache=cache), *SHORT, *what, *how, jobs.UNSAVED]
    job += [f"--training.local_batch_size={size}"]
    results = ranks.run(train, job, evaluating=evaluating, world=world)
    pj.assert_same_training(results, reference)
    if evaluating:
        pj.assert_same_evaluation(results, reference, cp=2 if "cp 2" in layout else 1)


class OfOwnHeads(Shared):
    """Each rank keeps the gradient that its own heads have."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        whole = partial(wrapped, mesh=device_mesh, placement=self.stream)
        module.register_forward_hook(
            lambda _, inputs, x: whole(x).redistribute(placements=[Replicate()]).to_local()
        )
        return module


class OfOwnTokens(Copied):
    """Each rank takes its own tokens' gradient for that of all."""

    def __init__(self, stream: Placement) -> None:
        super().__init__(stream)
        self.tokens = Replicate()


def train_with(job: list[str], *, name: str, planted: type) -> pj.Trained:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor, name, planted)
        return train(job)


@pytest.mark.parametrize(("name", "planted"), [("Shared", OfOwnHeads), ("Copied", OfOwnTokens)])
def test_a_gradient_that_lacks_the_other_ranks_is_seen(
    name: str,
    planted: type,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: OneDevice,
) -> None:
    reference = on_one_device(train, *SHORT, toml=DEEPSEEK, evaluating=True)
    job = [*jobs.write_job(tmp_path, DEEPSEEK, cache=cache), *SHORT, TP2, jobs.UNSAVED]
    job += ["--training.local_batch_size=8"]
    results = ranks.run(train_with, job, name=name, planted=planted, world=2)
    wanted = reference.gradients["layers.1.attention.wkv_a.weight"]
    found = results[0].gradients["layers.1.attention.wkv_a.weight"]
    assert (found - wanted).norm() > 0.05 * wanted.norm()
    assert results[0].rows[0]["loss"] == pytest.approx(reference.rows[0]["loss"], rel=1e-6)


def test_every_part_is_trained(on_one_device: OneDevice) -> None:
    """What the layouts are compared with is no model in which some part does nothing."""
    result = on_one_device(train, *SHORT, toml=DEEPSEEK, evaluating=True)
    biases = {name for name in result.gradients if name.endswith("expert_bias")}
    assert len(biases) == 3
    assert not any(result.gradients[name].any() for name in biases)
    names = {name for name in result.gradients if name.startswith("layers.1.")} - biases
    parts = ("wq_a", "q_norm", "wq_b", "wkv_a", "kv_norm", "wkv_b", "wo", "shared_experts.w1")
    assert all(any(part in name for name in names) for part in (*parts, "experts.w2", "gate"))
    largest = max(float(gradient.norm()) for gradient in result.gradients.values())
    assert all(float(result.gradients[name].norm()) > 1e-4 * largest for name in names)
