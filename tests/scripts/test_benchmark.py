"""The command runs, its figures are what it measured, and it gives none where results differ."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import benchmark
from scripts.benchmarks import attention, calibrate, gpu, loss, pipeline, prepare, recompute, train
from scripts.benchmarks.pairs import Comparison, DisagreementError, alternate, check_close
from scripts.benchmarks.theirs import build_theirs
from scripts.benchmarks.trace import top_operations
from scripts.benchmarks.turns import check_losses
from tests.models.reference import EXPERTS, TINY, random_decoder
from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config
from torchtitan.models.families import MODELS
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.tools.plan.devices import DEVICES, Share, find_device

pytestmark = [pytest.mark.usefixtures("warm_starts"), pytest.mark.long]

SCRIPT = Path(__file__).parents[2] / "scripts" / "benchmark.py"
TINY_TRAINING = ("--flavor", "tiny", "--batch", "2", "--seq_len", "16", "--steps", "4")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def measured(folder: Path, *arguments: str, num_pairs: int) -> dict[str, Any]:
    """Run a command, compare its table with its figures, and return these."""
    out, plot = folder / "figures.json", folder / "figures.png"
    done = run(
        *(*arguments, "--pairs", str(num_pairs)),
        *("--out", str(out), "--plot", str(plot)),
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, Any] = json.loads(out.read_text())
    for row in figures["comparisons"]:
        assert row["name"] in done.stdout
        pairs = zip(row["ours_s"], row["other_s"], strict=True)
        assert row["ratios"] == pytest.approx([ours / other for ours, other in pairs])
        assert len(row["ratios"]) == num_pairs
        assert min(row["ours_s"] + row["other_s"]) > 0
    assert all(note[:40] in done.stdout for note in figures["notes"])
    assert plot.read_bytes().startswith(b"\x89PNG")
    return figures


def names(figures: dict[str, Any]) -> list[str]:
    return [row["name"] for row in figures["comparisons"]]


def test_upload(tmp_path: Path) -> None:
    figures = measured(tmp_path, "upload", "--size_mib", "20", num_pairs=1)
    assert names(figures) == ["upload / boto3", "download / boto3"]


def test_checkpoint_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    figures = measured(
        tmp_path,
        *("checkpoint", "--size_gib", "0.001", "--folder", str(tmp_path / "disk")),
        num_pairs=2,
    )
    assert figures["size_gib"] == 0.001
    assert names(figures) == [
        "save / torch.save, elapsed",
        "save / torch.save, processor",
        "load / torch.load, elapsed",
        "load / torch.load, processor",
        "blocked by async / sync",
    ]
    assert list((tmp_path / "disk").iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_compares_results_times_and_peaks(dtype: str, tmp_path: Path) -> None:
    """Whole logits take three times their size; a 16th of that leaves room for what else there is,
    which counts for much at so small a size."""
    out = tmp_path / "figures.json"
    sizes = ("--seq_len", "1024", "--vocab_size", "8192", "--width", "32", "--chunks", "16")
    done = run("loss", *sizes, "--dtype", dtype, "--pairs", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["chunk_size"] == 64
    assert figures["logits_bytes"] == 4 * 1024 * 8192
    assert figures["peak_bytes"]["other"] > 2 * figures["logits_bytes"]
    assert 0 < figures["peak_bytes"]["ours"] < figures["logits_bytes"]
    assert 0 <= figures["gaps"]["dweight"] < 0.01
    for row in figures["comparisons"]:
        assert row["name"] in done.stdout
        assert len(row["ratios"]) == 2


def test_results_that_differ_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    correct = loss.Case.loss
    monkeypatch.setattr(
        loss.Case,
        "loss",
        lambda self, *, is_ours: (
            lambda *tensors: correct(self, is_ours=is_ours)(*tensors) * (1.001 if is_ours else 1)
        ),
    )
    sizes = ["--seq_len=16", "--vocab_size=32", "--width=8", "--pairs=1", "--threads=1"]
    assert benchmark.main(["loss", *sizes]) == 1
    assert "no ratio is given" in capsys.readouterr().err


def test_all_step_loops_train_the_same(tmp_path: Path) -> None:
    """On two ranks; docs/performance.md runs one."""
    ranks = 2
    figures = measured(tmp_path, "train", *TINY_TRAINING, "--ranks", str(ranks), num_pairs=1)
    assert names(figures)[:4] == [
        f"step loop / {name}, {clock}"
        for name in ("bare loop", "transformers")
        for clock in ("elapsed", "processor")
    ]
    assert figures["gaps"]["bare loop"] < 1e-5  # the same model and optimizer
    assert figures["gaps"]["transformers"] < 5e-5
    assert all(peak["peak_gib"] > 0 for peak in figures["memory"].values())
    for row in figures["comparisons"][::2]:
        assert row["amount"] == 2 * 16 * 4 * ranks
        assert row["ours_per_second"] * row["ours_s"][0] == pytest.approx(row["amount"])


def test_loops_that_part_give_no_ratio() -> None:
    rows = [{"step": 1.0, "loss": 5.0}, {"step": 3.0, "loss": 4.8}]
    with pytest.raises(DisagreementError, match=r"losses of ours and other.*no ratio"):
        check_losses("other", [5.0, 4.9, 4.7], rows=rows, dtype="float32")
    same = [rows[0], {"step": 2.0, "loss": 4.9}]
    assert check_losses("other", [5.0, 4.9, 4.7], rows=same, dtype="float32") == 0.0


SCALED = RopeScaling(
    type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=16
)


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


def test_recomputing_policies_are_compared_and_save_memory(tmp_path: Path) -> None:
    """Eight blocks keep about 17 times their input of 8 x 256 x 32 numbers each: 36 MB."""
    sizes = ("--flavor", "tiny8", "--batch", "8", "--seq_len", "256", "--steps", "1")
    figures = measured(tmp_path, "recompute", *sizes, num_pairs=1)
    others = ("full", "every 2nd block", "by operator")
    clocks = ("elapsed", "processor")
    assert names(figures) == [f"{name} / none, {clock}" for name in others for clock in clocks]
    memory = figures["memory_gib"]
    assert max(memory["full"], memory["by operator"]) < memory["none"]
    assert memory["full"] < memory["every 2nd block"] < memory["none"]


def test_policies_that_part_give_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"losses": {"none": [5.0, 4.9], "full": [5.0, 4.8]}}
    monkeypatch.setattr(recompute, "run_ranks", lambda *args, **settings: found)
    assert benchmark.main(["recompute", "--flavor", "tiny"]) == 1


def test_gpu_compares_trains_and_reads_a_trace(tmp_path: Path) -> None:
    figures = measured(tmp_path, "gpu", "--toy", "--only", "1B", "trace", num_pairs=1)
    assert names(figures) == [f"1B: step loop / bare loop, {c}" for c in ("elapsed", "processor")]
    assert figures["train"]["1B"]["apart"]
    assert figures["jobs"]["trace"]["tokens_per_second"] > 0
    parts = [part for _, part in figures["top_operations"]]
    assert len(parts) == 3
    assert 1 > parts[0] >= parts[1] >= parts[2] > 0


def test_gpu_names_a_job_that_fails_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = {name: (f"--training.seq_len={given}",) for name, given in (("a", "x"), ("b", "-1"))}
    monkeypatch.setattr(gpu, "JOBS", jobs)
    assert benchmark.main(["gpu", "--toy", "--only", "a", "b"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name, given in (("a", "x"), ("b", "-1")):
        assert f"- {name}: not measured, it ended with code 2: " in shown
        assert f"--training.seq_len {given}: must be" in shown


def test_gpu_measures_constants_that_the_planner_reads(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    assert benchmark.main(["gpu", "--toy", "--calibrate", str(file)]) == 0
    written = json.loads(file.read_text())
    device = find_device(str(file), memory_gib=None)
    assert device.name == "H100"
    for name in ("products", "attention", "passes", "copies", "launch", "on_host"):
        share = getattr(device, name)
        assert {"worst": share.worst, "best": share.best} == written[name]
        assert min(written[name].values()) > 0
    assert device.to_host == DEVICES["H100"].to_host  # of which a share was measured
    assert device.links == DEVICES["H100"].links
    assert find_device(str(file), memory_gib=8).memory == 8 * 2**30
    for spoilt in ({"memory": "much"}, {"product": "NVIDIA H1000"}, {"passes": {"worst": 1}}):
        file.write_text(json.dumps(written | spoilt))
        with pytest.raises(ConfigError, match=r"--device .*measured\.json.* must be "):
            find_device(str(file), memory_gib=None)


def test_copies_are_measured_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a link on which reading is half as quick as writing: the lower is the worst."""
    took = iter([2.0, 4.0])
    monkeypatch.setattr(calibrate, "_seconds", lambda work, _: work() is not None and next(took))
    known = replace(DEVICES["H100"], to_host=4.0 * calibrate.NUMEL)  # a second
    found = calibrate._copies(known, torch.device("cpu"), shrunk=1024)
    assert found == Share(worst=1 / 4 / 1024, best=1 / 2 / 1024)


def test_gpu_asks_for_jobs_that_there_are() -> None:
    for name, words in gpu.JOBS.items():
        config = load_config([*gpu.REAL.job, "--training.dataset=synthetic", *words])
        assert config.model.flavor == "1B", name
        toy = load_config([*gpu.TOY.job, "--training.dataset=synthetic", *gpu.TOY.fit(words)])
        assert toy.model.flavor == "tiny", name
        # a CPU has no float8
        assert toy.quantize.linear.float8.emulate == bool(toy.model.converters), name
    parser = benchmark._parser()
    for words in gpu.COMPARISONS.values():
        args = parser.parse_args(["train", "--apart", "--pairs", "5", *words, *gpu.REAL.comparison])
        load_config(train.describe_job({**vars(args), "tokenizer": "byte"}, folder=Path("x")))


def test_the_figures_of_a_job_are_those_after_its_first_steps() -> None:
    seconds, peaks = (9.0, 5.0, 1.0, 2.0, 3.0), (3.0, 9.0, 4.0, 4.0, 4.0)
    rows = [
        {"step": i, "tokens_per_second": 6 / s, "step_time_s": s, "mfu": s, "memory_peak_gib": p}
        for i, (s, p) in enumerate(zip(seconds, peaks, strict=True))
    ]
    assert gpu.summarize(rows) == {
        "tokens_per_second": 3.0,
        "step_time_s": 2.0,
        "mfu": 2.0,
        "memory_peak_gib": 9.0,
    }


def test_a_job_without_mfu_has_figures_too() -> None:
    row = {"step": 1, "tokens_per_second": 6, "step_time_s": 1, "mfu": None, "memory_peak_gib": 3.0}
    figures = gpu.summarize([row] * 3)
    assert "mfu" not in figures
    assert "MFU" not in gpu._say(figures)


def test_a_trace_tells_where_the_time_went(tmp_path: Path) -> None:
    """On a CPU mm's 5 of block's 10 are its own, and the other thread's 3 are add's; on a GPU only
    kernels count."""
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
    assert dict(top_operations(path)) == pytest.approx(parts)
    write(*called, ("kernel", "gemm", 0, 3, 7), ("kernel", "copy", 3, 1, 7))
    assert top_operations(path, count=1) == [("gemm", 0.75)]


def test_data_counts_its_tokens(tmp_path: Path) -> None:
    figures = measured(
        tmp_path,
        *("data", "--megabytes", "0.05", "--batches", "2", "--batch", "2", "--seq_len", "64"),
        num_pairs=1,
    )
    ours = [f"{name}, {n} workers / numpy" for name in ("store", "JSONL", "mix") for n in (0, 2)]
    assert names(figures)[:6] == ours
    assert all(row["amount"] == 2 * 2 * 64 for row in figures["comparisons"])


def test_prepare_makes_the_same_tokens_in_every_way(tmp_path: Path) -> None:
    sizes = ("--megabytes", "0.05", "--vocab_size", "512", "--workers", "1")
    figures = measured(tmp_path, "prepare", *sizes, num_pairs=1)
    ways, clocks = ("tokenizer.json", "tiktoken file"), ("elapsed", "processor")
    assert names(figures) == [f"{way} / datasets, {clock}" for way in ways for clock in clocks]
    assert figures["num_tokens"] > 10_000
    assert min(figures["memory_gib"].values()) > 0


def test_prepare_gives_no_ratio_where_tokens_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, num_tokens in (("_ours", 100), ("_peer", 101)):
        turn = prepare._Turn(1.0, 1.0, 1.0, num_tokens)
        monkeypatch.setattr(prepare, name, lambda *args, turn=turn, **settings: turn)
    assert benchmark.main(["prepare", "--megabytes", "0.05", "--vocab_size", "512"]) == 1
    assert "100.0 and 101.0" in capsys.readouterr().err


def test_startup_compares_the_loss_of_the_first_step(tmp_path: Path) -> None:
    figures = measured(tmp_path, "startup", "--seq_len", "16", num_pairs=1)
    assert [name.split(", ")[1] for name in names(figures)] == ["elapsed", "processor"]
    assert figures["notes"][0].startswith("losses of the first step agree")


def test_attention_agrees_and_counts_what_it_sends(tmp_path: Path) -> None:
    figures = measured(
        tmp_path,
        *("attention", "--seq_len", "32", "--heads", "4", "--kv_heads", "2", "--head_dim", "8"),
        num_pairs=1,
    )
    assert names(figures) == [f"{m} / whole" for m in attention.METHODS]
    # keys and values of 16 tokens, 2 heads of 8, float32
    kv = 2 * 16 * 2 * 8 * 4
    sent = {name: each["bytes"] for name, each in figures["methods"].items()}
    assert sent == {"ring": 4 * kv, "allgather": 3 * kv, "ulysses": kv + 2 * kv}


def test_pipeline_measures_against_the_table(tmp_path: Path) -> None:
    figures = measured(
        tmp_path,
        *("pipeline", "--sleep_ms", "4", "--schedules", "1F1B", "ZBVZeroBubble"),
        num_pairs=1,
    )
    assert names(figures) == ["1F1B", "ZBVZeroBubble"]
    # p = 2, m = 4: (p - 1) / m and (p - 1) / (6 m)
    promised = {name: each["promised"] for name, each in figures["bubbles"].items()}
    assert promised == pytest.approx({"1F1B": 1 / 4, "ZBVZeroBubble": 1 / 24})
    for row in figures["comparisons"]:
        # a nap lasts at least as long as it was told to: 4 microbatches of 3 naps
        ideal = 4 * 3 * 0.004
        assert row["other_s"][0] >= ideal * (1 + promised[row["name"]])


def test_sleeping_stages_double_and_take_their_naps() -> None:
    stage = pipeline.SleepingStage(seconds=0.001, first=False, last=False)
    x = torch.ones(3, requires_grad=True)
    (stage(x) * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0, 6.0]
    assert stage.weight.grad == 6.0
    assert len(stage.naps) == 3
    assert min(stage.naps) >= 0.001


def test_ways_take_turns_and_the_first_pair_is_not_counted() -> None:
    order: list[str] = []

    def way(name: str) -> float:
        order.append(name)
        return float(len(order))

    found = alternate("x", "", lambda: way("a"), lambda: way("b"), num_pairs=2)
    assert order == ["a", "b"] * 3
    assert (found.ours_s, found.other_s) == ([3.0, 5.0], [4.0, 6.0])
    assert Comparison("x", "", [3.0, 5.0, 1.0], [1.0, 1.0, 1.0]).figures()["ratio"] == 3.0


def test_figures_agree_within_the_tolerance() -> None:
    assert check_close("x", [1.0, 2.0], [1.0, 2.02], tolerance=0.011) == pytest.approx(0.02 / 2.02)
    for ours, other in (([2.0], [2.1]), ([2.0], [math.nan]), ([1.0, 2.0], [1.0]), ([], [])):
        with pytest.raises(DisagreementError, match="no ratio is given"):
            check_close("x", ours, other, tolerance=0.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "WHAT"),
        (("train", "--pairs", "0"), "at least 1"),
        (("train", "--flavor", "9B"), "[model] flavor: must be one of"),
        (("train", "--flavor", "tiny", "--ranks", "2", "--others", "Trainer"), "leaves nobody"),
        (("attention", "--seq_len", "30"), "try 28"),
        (("attention", "--kv_heads", "3"), "--kv_heads must be a multiple of the 2 ranks"),
        (("pipeline", "--schedules", "1F1B", "--microbatches", "1"), "at least as many"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exit_code: object = benchmark.main(arguments)
    except SystemExit as ended:  # argparse
        exit_code = ended.code
    assert exit_code == 2
    assert message in capsys.readouterr().err
