"""The same model in every layout, with every feature: a table with a row for each pair of them.

A row is a job: where it runs, what it trains, and how. Its results are compared with those of one
device, in float32, where only rounding may differ: initial weights bit for bit, each parameter's
first gradient before clipping, losses and norms, an evaluation after the first step, final weights,
and the names of trained parameters. A mistake seldom needs more than two things to come together,
so each pair of axis and feature of the dense model has a row (`test_every_pair_has_its_row`), and
not each combination. Other families, optimizers and the examples have a row wherever their own code
meets an axis or a feature.

The model has four layers, sizes that two tensor-parallel ranks can split and two shards of that
cannot evenly, and strong attention; the samples have a random number of valid labels.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.jobs import FEATURES, LAYOUTS, MODELS, OPTIONS, TINY8

TABLE: list[tuple[str, str, str]] = [
    ("one device", "all", "recomputed, accumulating, offloaded"),
    ("fsdp 2", "adapter", "recomputed, offloaded"),
    ("fsdp 2", "adapter", "compiled"),
    ("fsdp 2", "bfloat16", "by operator, accumulating, kept"),
    ("fsdp 2", "few", "by operator, kept"),
    ("ddp 2", "documents", "half recomputed, accumulating, chunks"),
    ("hsdp 2x2", "tied", "accumulating, chunks"),
    ("hsdp 2x2", "all but a tied embedding", "recomputed"),
    ("tp 2", "documents", "kept"),
    ("tp 2, stream copied", "adapter", "by operator, accumulating"),
    ("tp 2, logits gathered", "tied", "half recomputed, offloaded"),
    ("fsdp 2 x tp 2", "few", "recomputed, offloaded, chunks"),
    ("ddp 2 x tp 2", "bfloat16", "half recomputed, chunks"),
    ("pp 2", "few", "half recomputed, accumulating"),
    ("pp 2", "tied", "kept"),
    ("pp 2", "all but a tied embedding", "by operator, chunks"),
    ("pp 2 ZBV", "documents", "offloaded"),
    ("pp 2 ZBV", "few", "accumulating"),
    ("pp 2 Interleaved x fsdp 2", "adapter", "half recomputed, kept, chunks"),
    ("pp 2 ZBV x ddp 2", "adapter", "chunks"),
    ("pp 2 x tp 2", "tied", "recomputed, chunks"),
    ("pp 2 DualPipeV x tp 2, nothing else split", "all but a tied embedding", "offloaded"),
    ("pp 2 ZBV", "tied", "kept"),
    ("cp 2 allgather", "adapter", "chunks"),
    ("cp 2 allgather balanced", "documents", "recomputed"),
    ("cp 2 ring", "few", "recomputed, accumulating"),
    ("cp 2 ulysses", "documents", "by operator"),
    ("cp 2 ulysses contiguous", "tied", "by operator, offloaded"),
    ("cp 4 ring", "documents", "chunks"),
    ("cp 4 ulysses", "all but a tied embedding", "accumulating, kept"),
    ("cp 4 allgather contiguous", "all", "half recomputed"),
    ("cp 2 ring x fsdp 2", "bfloat16", "kept, offloaded"),
    ("cp 2 allgather x ddp 2", "all but a tied embedding", "half recomputed, offloaded"),
    ("cp 2 ulysses x tp 2", "all but a tied embedding", "half recomputed"),
    ("cp 2 allgather x pp 2", "bfloat16", "recomputed"),
    ("cp 2 ring x pp 2 ZBV", "bfloat16", ""),
    ("cp 2 ring balanced x pp 2 x tp 2", "documents", ""),
]
OF_FAMILIES: list[tuple[str, str, str]] = [
    ("one device", "experts", "recomputed, accumulating"),
    ("fsdp 2", "frozen routers, odd tokens", ""),
    ("fsdp 3", "experts, in sixes", ""),
    ("hsdp 2x2", "experts, Muon", ""),
    ("cp 2 ring", "experts", "recomputed"),
    ("cp 2 ulysses", "experts, documents", ""),
    ("pp 2 ZBV", "experts in four layers", ""),
    ("tp 2", "experts", ""),
    ("tp 2, stream copied", "experts, odd tokens", "recomputed"),
    ("ep 2", "experts", "by operator"),
    ("ep 2", "experts", "compiled"),
    ("ep 2", "experts, odd tokens", "recomputed, accumulating"),
    ("ep 2", "frozen experts", "half recomputed"),
    ("ep 2", "experts, adapters", ""),
    ("ep 4", "experts", "offloaded"),
    ("ep 2 x fsdp 2", "experts, Muon", ""),
    ("ep 2 x hsdp 2x2", "experts", ""),
    ("ep 2 x tp 2", "experts", "recomputed"),
    ("ep 2 x tp 2, stream copied", "experts, odd tokens", ""),
    ("ep 2 x cp 2 ring", "experts", ""),
    ("ep 2 x pp 2 x fsdp 2", "experts in four layers", ""),
    ("ep 2 x pp 2 InterleavedZeroBubble x fsdp 2", "experts in four layers", ""),
    ("fsdp 4", "few experts", ""),
    ("ep 2 x tp 2 x fsdp 2", "few experts", ""),
    ("one device", "balanced", "recomputed"),
    ("fsdp 2", "balanced", "by operator, accumulating"),
    ("fsdp 2", "balanced", "compiled, recomputed"),
    ("hsdp 2x2", "balanced", "offloaded"),
    ("cp 2 allgather x fsdp 2", "balanced, documents", ""),
    ("tp 2, stream copied", "balanced, odd tokens", "recomputed"),
    ("ep 2", "balanced", "half recomputed"),
    ("ep 4 x tp 2 x fsdp 2", "balanced", ""),
    ("ep 2 x pp 2 DualPipeV x fsdp 2", "balanced in four layers", ""),
    ("one device", "balanced, padding", "recomputed, accumulating"),
    ("cp 2 ring x pp 2 ZBV", "balanced, padding", ""),
    ("ep 2 x tp 2, stream copied", "balanced, padding", "recomputed"),
    ("one device", "DeepSeek", "recomputed, accumulating"),
    ("fsdp 2", "DeepSeek", "by operator"),
    ("cp 2 ulysses", "DeepSeek, documents", ""),
    ("tp 2, stream copied", "DeepSeek", "recomputed"),
    ("tp 2", "DeepSeek, adapters", ""),
    ("tp 2, stream copied", "DeepSeek, adapters", ""),
    ("ep 2 x cp 2 ring x tp 2", "DeepSeek, documents", ""),
    ("ep 4 x cp 2 ring x fsdp 2", "DeepSeek", "recomputed"),
    ("ep 2 x pp 2 ZBV x fsdp 2", "DeepSeek in four layers", ""),
    ("ep 2 x pp 2 Interleaved x tp 2", "DeepSeek in four layers", "recomputed"),
    ("fsdp 2", "GLM", "compiled"),
    ("tp 2, stream copied", "GLM", ""),
    ("pp 2 ZBV", "GLM in four layers", ""),
    ("cp 2 ulysses", "GLM", ""),
    ("ep 2 x cp 2 ring x tp 2", "GLM", ""),
    ("ep 2 x pp 2 Interleaved x tp 2", "GLM in four layers", ""),
    ("pp 2", "Qwen2", ""),
    ("tp 2", "Qwen2, adapters", ""),
    ("tp 2", "Qwen3", "recomputed"),
    ("fsdp 2", "Mistral", "by operator"),
    ("tp 2", "Mistral, documents", "compiled"),
    ("pp 2", "Mistral", "recomputed"),
    ("cp 2 ulysses", "Mistral, documents", ""),
    ("cp 4 allgather contiguous", "Mistral", "recomputed"),
    ("cp 2 ring x tp 2, stream copied", "Mistral, documents", ""),
    ("fsdp 2", "Mixtral", "recomputed"),
    ("pp 2 ZBV", "Mixtral in four layers", ""),
    ("cp 2 ulysses", "Mixtral", "by operator"),
    ("ep 2 x cp 2 ring x tp 2", "Mixtral", ""),
    ("fsdp 2", "GPT-OSS", "compiled, recomputed"),
    ("pp 2 ZBV", "GPT-OSS in four layers", ""),
    ("cp 2 ring", "GPT-OSS", "by operator"),
    ("cp 2 ulysses x tp 2", "GPT-OSS, documents", ""),
    ("cp 2 ring balanced x pp 2 x tp 2", "GPT-OSS, documents", ""),
    ("ep 2 x cp 2 ring x tp 2", "GPT-OSS", ""),
    ("ep 4 x cp 2 ring x fsdp 2", "GPT-OSS", ""),
    ("tp 2", "OLMo 2", "compiled"),
    ("cp 2 ring", "OLMo 3", ""),
    ("cp 4 allgather contiguous", "OLMo 3", "recomputed"),
    ("tp 2", "OLMo 3, adapters", ""),
    ("fsdp 2", "Gemma", "by operator, accumulating"),
    ("tp 2, stream copied", "Gemma", "recomputed"),
    ("pp 2 ZBV", "Gemma", ""),
    ("cp 2 ulysses x tp 2", "Gemma, documents", ""),
    ("cp 2 ring balanced x pp 2 x tp 2", "Gemma, documents", ""),
    ("pp 2 Interleaved x fsdp 2", "SmolLM3", "half recomputed"),
    ("cp 2 ring x tp 2, stream copied", "SmolLM3", ""),
    ("pp 2 x tp 2", "Granite", "chunks"),
    ("pp 2", "Phi", ""),
    ("fsdp 2 x tp 2", "Phi", "by operator"),
    ("fsdp 2", "pairs", "by operator"),
    ("pp 2 ZBV", "pairs", ""),
    ("tp 2, stream copied", "pairs, adapters", ""),
    ("cp 2 ulysses", "pairs, packed", "accumulating"),
    ("cp 2 ring balanced x pp 2 x tp 2", "pairs, packed", ""),
    ("ep 2 x cp 2 ring x tp 2", "pairs, experts", ""),
    ("fsdp 3", "Muon, in sixes", ""),
    ("ddp 2", "Muon, groups", ""),
    ("cp 2 ring", "Muon", ""),
    ("tp 2", "Muon, adapters", ""),
    ("fsdp 2 x tp 2", "Muon, groups", ""),
    ("pp 2", "Muon", ""),
    ("fsdp 2", "own family", "compiled, recomputed"),
    ("tp 2", "own family", ""),
    ("pp 2 ZBV", "own family", ""),
    ("cp 2 ring x fsdp 2", "own family", "recomputed"),
    ("hsdp 2x2", "own things", ""),
    ("tp 2", "own things", ""),
    ("pp 2 ZBV", "own things", ""),
    ("cp 2 ring", "own things", ""),
    ("fsdp 2", "Exaone", "recomputed, accumulating"),
    ("hsdp 2x2", "Exaone, documents", "kept, chunks"),
    ("fsdp 2 x tp 2", "Exaone", "half recomputed"),
    ("cp 2 ring", "Starcoder", "recomputed"),
    ("cp 2 ring", "Exaone, documents", ""),
    ("cp 2 ulysses", "Exaone", "offloaded"),
    ("tp 2", "Exaone, adapters", ""),
    ("fsdp 2", "Exaone, documents", "compiled"),
    ("tp 2, stream copied", "Starcoder", "recomputed"),
    ("ddp 2 x tp 2", "Starcoder", "compiled"),
    ("cp 2 ring x tp 2, stream copied", "Starcoder, documents", ""),
]
IMPOSSIBLE = {
    # torch would recompute each block eleven times
    ("halves", how)
    for how in ("recomputed", "half recomputed", "by operator")
}


def words(row: tuple[str, str, str]) -> set[str]:
    where, what, how = row
    return {*LAYOUTS[where].degrees, what, *how.split(", ")} - {"all", ""}


@pytest.mark.promise("mixes")
def test_every_pair_has_its_row() -> None:
    found = {frozenset(pair) for row in TABLE for pair in combinations(sorted(words(row)), 2)}
    axes = ("dp", "tp", "pp", "halves", "cp")
    things = [*FEATURES][1:]
    ways = OPTIONS.keys() - {"compiled"}  # that has its own file, test_compile.py
    wanted = [(axis, other) for axis in axes for other in (*things, *ways)]
    wanted += [*combinations(axes, 2), *((what, how) for what in things for how in ways)]
    assert [
        pair for pair in wanted if frozenset(pair) not in found and pair not in IMPOSSIBLE
    ] == []


@pytest.fixture
def assert_as_on_one_device(
    ranks: RankPool, tmp_path: Path, cache: Path, texts: Path, on_one_device: OneDevice
) -> Callable[[tuple[str, str, str]], None]:
    """Train a row, and compare it."""

    def compare(row: tuple[str, str, str]) -> None:
        layout, what, how = row
        where, options = LAYOUTS[layout], MODELS[what].options(texts)
        of_tokens = "pairs" not in what
        reference = on_one_device(pj.train, *options, evaluating=of_tokens)
        job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *options, *where.options(how)]
        evaluating = of_tokens and "compiled" not in how  # that would compile once more
        results = ranks.run(pj.train, job, evaluating=evaluating, world=where.world)
        if what == "bfloat16":
            losses = [row["loss"] for row in results[0].rows]
            assert losses == pytest.approx([row["loss"] for row in reference.rows], rel=1e-3)
            return
        pj.assert_same_training(results, reference)
        if "Muon" in what:  # which divides by no second moment
            for name, value in pj.whole(results, lambda result: result.final).items():
                wanted = reference.final[name]
                assert (value - wanted).norm() <= 1e-5 * wanted.norm(), name
        if what == "own things":  # examples.own_hooks:CsvSink
            lines = (tmp_path / "run" / "losses.csv").read_text().splitlines()
            assert [line.partition(",")[0] for line in lines] == ["1", "2"]
        if "dp" not in where.degrees:  # the maximum over one data-parallel rank
            for row_of_step in results[0].rows:
                assert row_of_step["max_loss"] == pytest.approx(row_of_step["loss"], rel=1e-6)
        if evaluating:
            pj.assert_same_evaluation(results, reference, cp=where.degrees.get("cp", 1))

    return compare


@pytest.mark.promise(
    "initial-weights", "dp", "hsdp", "tp", "cp", "mixes", "loss", "lora", "clipping"
)
@pytest.mark.slow(
    gate=[
        "one device; all; recomputed, accumulating, offloaded",
        "fsdp 2; adapter; recomputed, offloaded",
        "ddp 2; documents; half recomputed, accumulating, chunks",
        "tp 2, logits gathered; tied; half recomputed, offloaded",
        "fsdp 2 x tp 2; few; recomputed, offloaded, chunks",
        "pp 2; tied; kept",
        "pp 2 ZBV; few; accumulating",
        "pp 2 Interleaved x fsdp 2; adapter; half recomputed, kept, chunks",
        "cp 2 allgather balanced; documents; recomputed",
        "cp 2 ring; few; recomputed, accumulating",
        "cp 4 ulysses; all but a tied embedding; accumulating, kept",
    ]
)
@pytest.mark.parametrize("row", TABLE, ids="; ".join)
def test_the_same_model(
    row: tuple[str, str, str], assert_as_on_one_device: Callable[[tuple[str, str, str]], None]
) -> None:
    assert_as_on_one_device(row)


@pytest.mark.promise(
    "dp", "ep", "mixes", "loss", "lora", "balance", "optimizers", "clipping", "nobody-forks"
)
@pytest.mark.slow(
    gate=[
        "ep 2 x tp 2, stream copied; experts, odd tokens; ",
        "ep 4; experts; offloaded",
        "one device; DeepSeek; recomputed, accumulating",
        "one device; balanced, padding; recomputed, accumulating",
        "pp 2; Muon; ",
    ]
)
@pytest.mark.parametrize("row", OF_FAMILIES, ids="; ".join)
def test_families_optimizers_and_examples(
    row: tuple[str, str, str], assert_as_on_one_device: Callable[[tuple[str, str, str]], None]
) -> None:
    assert_as_on_one_device(row)


@pytest.mark.promise("mixes")
@pytest.mark.parametrize(
    ("what", "count"), [("few", 9), ("all but a tied embedding", 33), ("adapter", 55)]
)
def test_what_is_frozen_stays_and_all_else_moves(
    what: str, count: int, texts: Path, on_one_device: OneDevice
) -> None:
    result = on_one_device(pj.train, *MODELS[what].options(texts), evaluating=True)
    for name, weights in result.final.items():
        assert torch.equal(weights, result.initial[name]) != (name in result.trained), name
    assert len(result.trained) == count


@pytest.mark.promise("bfloat16")
def test_bfloat16_is_near_float32(texts: Path, on_one_device: OneDevice) -> None:
    """Within its rounding, 2^-8, and no closer than that."""
    found = {
        what: [
            row["loss"]
            for row in on_one_device(pj.train, *MODELS[what].options(texts), evaluating=True).rows
        ]
        for what in ("all", "bfloat16")
    }
    assert found["bfloat16"] == pytest.approx(found["all"], rel=2**-8)
    assert found["bfloat16"] != pytest.approx(found["all"], rel=1e-6)


@pytest.mark.parametrize("what", ["experts", "DeepSeek"])
def test_every_part_of_a_model_with_experts_is_trained(
    what: str, texts: Path, on_one_device: OneDevice
) -> None:
    """Each part of the reference model has a gradient."""
    gradients = on_one_device(pj.train, *MODELS[what].options(texts), evaluating=True).gradients
    biases = {name for name in gradients if name.endswith("expert_bias")}
    assert len(biases) == (2 if what == "DeepSeek" else 0)
    assert not any(gradients[name].any() for name in biases)
    names = {name for name in gradients if name.startswith("layers.1.")} - biases
    parts = ["experts.w1", "experts.w2", "experts.w3", "router.gate", "attention.wo"]
    if what == "DeepSeek":
        parts += ["wq_a", "q_norm", "wq_b", "wkv_a", "kv_norm", "wkv_b", "shared_experts.w1"]
    assert all(any(part in name for name in names) for part in parts)
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    assert all(float(gradients[name].norm()) > 1e-4 * largest for name in names)
