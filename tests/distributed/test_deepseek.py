"""DeepSeek-V3 trains alike in every layout: latent attention, shared experts, groups, a bias.

As for Qwen3's experts, whose tests have all layouts: the first of four layers is dense, and
gradients of every parameter are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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
