"""Each command runs and measures; results that differ give no ratio."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import benchmark
from scripts.benchmarks import gpu, kernels
from scripts.benchmarks.loops import build_theirs
from tests.models.reference import EXPERTS, TINY, random_decoder
from torchtitan.models.families import MODELS
from torchtitan.models.moe import multiply_grouped
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.tools.plan.devices import DEVICES, find_device


def measure(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a command for one pair and return its figures."""
    out = folder / "figures.json"
    assert benchmark.main([*arguments, "--pairs", "1", "--out", str(out)]) == 0
    figures: dict[str, Any] = json.loads(out.read_text())
    for row in figures["comparisons"]:
        pairs = zip(row["ours_s"], row["other_s"], strict=True)
        assert row["ratios"] == pytest.approx([ours / other for ours, other in pairs])
        assert len(row["ratios"]) == 1
    return figures


def names(figures: dict[str, Any]) -> list[str]:
    return [row["name"] for row in figures["comparisons"]]


SCALED = RopeScaling(
    type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16
)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama3", TINY),
        ("llama3", replace(TINY, rope_scaling=SCALED, tie_embeddings=True)),
        ("qwen3_moe", EXPERTS),
    ],
    ids=["plain", "3.2", "experts"],
)
def test_the_model_of_transformers_has_the_same_weights(family: str, sizes: DecoderConfig) -> None:
    model = random_decoder(sizes)
    theirs = build_theirs(model, MODELS[family])
    tokens = torch.randint(0, TINY.vocab_size, (2, 9))
    torch.testing.assert_close(theirs(input_ids=tokens).logits, model(tokens), rtol=1e-4, atol=1e-4)
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.long
def test_gpu_compares_and_reads_a_trace(tmp_path: Path) -> None:
    figures = measure(tmp_path, "gpu", "--toy", "--only", "1B", "trace")
    assert len(names(figures)) == 2
    trace = figures["measured"]["trace"]
    assert trace["tokens_per_second"] > 0
    parts = [part for _, part in trace["top_operations"]]
    assert 1 > parts[0] >= parts[1] >= parts[2] > 0


@pytest.mark.long
def test_gpu_compares_a_job_with_the_cpu_itself_and_its_resumption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU every gap is 0. A job that fails costs no other one."""
    monkeypatch.setattr(gpu, "FEW_COMPARED", (("llama3", "foreach"), ("llama3", "wrong")))
    monkeypatch.setattr(gpu, "HOW", {**gpu.HOW, "wrong": ("--optimizer.implementation=none",)})
    monkeypatch.setattr(gpu, "REPEATED", {"plain": ()})
    figures = measure(tmp_path, "gpu", "--toy", "--only", "CPU", "resume")["measured"]
    assert figures["CPU"]["gaps"] == {"llama3 foreach": 0.0}
    assert figures["CPU"]["failed"].startswith("llama3 wrong: code 2")
    assert figures["resume"]["gaps"] == {"plain, again": 0.0, "plain, resumed": 0.0}


def test_kernels_are_as_exact_as_their_types(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = kernels.measure_errors()
    assert all(map(kernels.is_good, found.values())), found
    assert len(found) == 2 * len(kernels.checks()) + 1

    def without_the_last(x: torch.Tensor, counts: torch.Tensor, weights: Any) -> torch.Tensor:
        return multiply_grouped(x, counts - (counts == counts.max()).int(), weights)

    experts = {"experts": kernels.checks()["experts"]}
    monkeypatch.setattr(kernels, "checks", lambda: experts)
    monkeypatch.setattr(kernels, "multiply_grouped", without_the_last)
    assert not all(map(kernels.is_good, kernels.measure_errors().values()))
    assert kernels.main([]) == 1
    out = tmp_path / "errors.json"
    assert kernels.main(["--out", str(out)]) == 0  # `gpu` reads it
    assert not all(map(kernels.is_good, json.loads(out.read_text()).values()))


def test_gpu_measures_constants_that_the_planner_reads(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    assert benchmark.main(["gpu", "--toy", "--calibrate", str(file)]) == 0
    written = json.loads(file.read_text())
    device = find_device(str(file), memory_gib=None)
    for name in ("products", "attention", "passes", "copies", "launch", "on_host"):
        share = getattr(device, name)
        assert {"worst": share.worst, "best": share.best} == written[name]
        assert min(written[name].values()) > 0
    assert device.to_host == DEVICES["H100"].to_host
    assert device.links == DEVICES["H100"].links
