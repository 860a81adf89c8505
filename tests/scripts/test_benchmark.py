"""Each command runs and measures; results that differ give no ratio."""

from __future__ import annotations

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import benchmark
from scripts.benchmarks import gpu, kernels, loss, turns
from scripts.benchmarks.loops import build_theirs
from scripts.benchmarks.pairs import Comparison, DisagreementError, alternate, check_close
from tests.models.reference import EXPERTS, TINY, random_decoder
from torchtitan.job import load_config
from torchtitan.models.families import MODELS
from torchtitan.models.moe import multiply_grouped
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.tools.plan.devices import DEVICES, find_device

SMALL_STEP = ("train", "--flavor", "tiny", "--batch", "2", "--seq_len", "16", "--steps", "4")
SMALL_LOSS = (
    "loss",
    "--seq_len",
    "1024",
    "--vocab_size",
    "8192",
    "--width",
    "32",
    "--chunks",
    "16",
)


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


def test_results_that_differ_give_no_ratio(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    correct = loss.Case.loss

    def wrong(case: loss.Case, *, is_ours: bool) -> Any:
        factor = 1.001 if is_ours else 1
        return lambda *tensors: correct(case, is_ours=is_ours)(*tensors) * factor

    monkeypatch.setattr(loss.Case, "loss", wrong)
    monkeypatch.setattr(loss, "_peak_apart", lambda case, *, is_ours: 1)
    sizes = ["--seq_len=16", "--vocab_size=32", "--width=8", "--pairs=1", "--threads=1"]
    assert benchmark.main(["loss", *sizes]) == 1
    assert "loss must agree within 1e-05" in capsys.readouterr().err


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


def test_gaps_are_those_of_the_worst_step_and_figure() -> None:
    rows = [{"loss": 4.0, "grad_norm": 2.0}, {"loss": 4.0, "grad_norm": 2.0}]
    assert gpu.largest_gap([rows[0], {"loss": 5.0, "grad_norm": 2.1}], rows) == 0.25


def test_gpu_reports_a_failure_and_measures_later_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is written after each measurement, and a device's figures stay its own."""
    out, tried, failing = tmp_path / "gpu.json", [], {"bfloat16"}
    figures = {"tokens_per_second": 6.0, "step_time_s": 1.0, "memory_peak_gib": 3.0}

    def measured(name: str, *_: Any, **__: Any) -> dict[str, float]:
        tried.append(name)
        if name in failing:
            raise subprocess.CalledProcessError(2, [], stderr="the reason")
        return figures

    monkeypatch.setattr(gpu, "_measure", measured)
    command = ["gpu", "--toy", "--out", str(out), "--only", "bfloat16", "not compiled"]
    assert benchmark.main(command) == 0
    assert "bfloat16: failed with code 2: the reason" in capsys.readouterr().out
    found = json.loads(out.read_text())["measured"]["not compiled"]
    assert found == figures | {"seconds": found["seconds"]}
    failing.clear()
    assert benchmark.main(command) == 0
    assert tried == ["bfloat16", "not compiled", "bfloat16"]
    out.write_text(out.read_text().replace('"toy"', '"real"'))
    assert benchmark.main(command) == 2


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


def test_gpu_jobs_have_valid_settings() -> None:
    for name, words in gpu.JOBS.items():
        config = load_config([*gpu.REAL_JOB, "--training.dataset=synthetic", *words])
        assert config.training.seq_len >= 8192, name
        small = gpu.fit(words, is_toy=True)
        toy = load_config([*gpu.TOY_JOB, "--training.dataset=synthetic", *small])
        assert (toy.model.flavor, toy.model.num_layers) == ("tiny", None), name
        assert toy.quantize.linear.float8.emulate == bool(toy.model.converters), name
    for words in gpu.COMPARISONS.values():
        args = benchmark.build_parser().parse_args(["train", "--apart", *words, *gpu.REAL_STEP])
        load_config(turns.describe_job({**vars(args), "tokenizer": "byte"}, folder=Path("x")))


def test_the_first_rows_of_a_job_are_not_counted() -> None:
    seconds, peaks = (9.0, 5.0, 1.0, 2.0, 3.0), (3.0, 9.0, 4.0, 4.0, 4.0)
    rows = [
        {"step": i, "tokens_per_second": 6 / s, "step_time_s": s, "mfu": None, "memory_peak_gib": p}
        for i, (s, p) in enumerate(zip(seconds, peaks, strict=True))
    ]
    expected = {"tokens_per_second": 3.0, "step_time_s": 2.0, "memory_peak_gib": 9.0}
    assert gpu.summarize(rows) == expected


def test_a_trace_is_summed_by_operation(tmp_path: Path) -> None:
    """On a CPU block's time excludes mm's, per thread; on a GPU only kernels count."""
    path = tmp_path / "trace.json"

    def write(*events: tuple[str, str, int, int, int]) -> None:
        keys = ("cat", "name", "ts", "dur", "tid")
        rows = [{"ph": "X", "pid": 1, **dict(zip(keys, e, strict=True))} for e in events]
        path.write_text(json.dumps({"traceEvents": [*rows, {"ph": "M", "name": "process"}]}))

    called = [
        ("cpu_op", "mm", 2, 5, 1),
        ("cpu_op", "block", 0, 10, 1),
        ("cpu_op", "add", 10, 2, 1),
        ("cpu_op", "add", 5, 1, 2),
        ("python_function", "train", 0, 99, 1),
    ]
    write(*called)
    parts = {"mm": 5 / 13, "block": 5 / 13, "add": 3 / 13}
    assert dict(gpu.top_operations(path)) == pytest.approx(parts)
    write(*called, ("kernel", "gemm", 0, 3, 7), ("kernel", "copy", 3, 1, 7))
    assert gpu.top_operations(path, count=1) == [("gemm", 0.75)]


def test_two_ways_take_turns_and_the_first_pair_is_not_counted() -> None:
    order: list[str] = []

    def way(name: str) -> dict[str, float]:
        order.append(name)
        return {"elapsed": float(len(order)), "processor": 1.0}

    found, _ = alternate("x", "", lambda: way("a"), lambda: way("b"), num_pairs=2)
    assert order == ["a", "b"] * 3
    assert (found.ours_s, found.other_s) == ([3.0, 5.0], [4.0, 6.0])
    assert Comparison("x", "", [3.0, 5.0, 1.0], [1.0, 1.0, 1.0]).figures()["ratio"] == 3.0


def test_figures_agree_within_the_tolerance() -> None:
    assert check_close("x", [1.0, 2.0], [1.0, 2.02], tolerance=0.011) == pytest.approx(0.02 / 2.02)
    for ours, other in (([2.0], [2.1]), ([2.0], [math.nan]), ([1.0, 2.0], [1.0]), ([], [])):
        with pytest.raises(DisagreementError):
            check_close("x", ours, other, tolerance=0.01)


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ((), "WHAT"),
        (("train", "--pairs", "0"), "--pairs"),
        (("train", "--flavor", "9B"), "[model] flavor"),
        (("train", "--flavor", "tiny", "--ranks", "2", "--others", "Trainer"), "--others"),
        (("train", "--recompute", "op", "--others", "Trainer"), "--recompute op"),
        (("pipeline", "--schedules", "1F1B", "--microbatches", "1"), "microbatches"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        exit_code: object = benchmark.main(arguments)
    except SystemExit as ended:  # argparse
        exit_code = ended.code
    assert exit_code == 2
    assert key in capsys.readouterr().err
