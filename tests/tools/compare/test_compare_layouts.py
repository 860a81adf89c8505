"""Layouts parsed, trained and compared: equal ones agree, planted bugs are caught."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config
from torchtitan.mesh.dims import resolve_dims
from torchtitan.parallel.execution import Batch
from torchtitan.tools.compare import command, gaps
from torchtitan.tools.compare.layouts import make_plans
from torchtitan.tools.compare.rank import GRADIENTS, record_gradients, share_gpus
from torchtitan.tools.compare.words import parse_layout
from torchtitan.tools.tensors import StoredTensors
from torchtitan.trainer import Trainer

pytestmark = pytest.mark.usefixtures("warm_starts")

TOML = Path(__file__).parents[3] / "train_configs" / "compare_layouts.toml"


@pytest.mark.parametrize(
    ("text", "dims", "dp"),
    [
        ("single", "one device", 1),
        ("hsdp2x3", "dp_replicate 2 x dp_shard 3", 6),
        ("pp2, fsdp2 tp4", "pp 2 x dp_shard 2 x tp 4", 2),
        ("ep4,fsdp2,tp2", "dp_shard 2 x tp 2 x ep 4", 2),
        ("cp2 --a.b='x y' 'ddp2'", "dp_replicate 2 x cp 2", 2),
    ],
)
def test_words(text: str, dims: str, dp: int) -> None:
    """Every degree is set, so that the TOML's do not count; options go behind."""
    layout = parse_layout(text)
    assert layout.overrides == (("--a.b=x y",) if "--" in text else ())
    options = [f"--job.config_file={TOML}", *layout.arguments[: -len(layout.overrides) or None]]
    options += ["--model.name=qwen3_moe"] if "ep" in text else []
    resolved = resolve_dims(load_config(options).parallelism, world_size=layout.world_size)
    assert str(resolved).replace(", experts dealt out to", " x") == dims
    assert layout.dp == dp


def test_ranks_share_gpus_if_there_are_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then is NCCL told that each is a host of its own."""
    ranks = {"RANK": "7", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    for num_gpus, local_rank in ((0, "3"), (1, "0"), (2, "1"), (4, "3")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        monkeypatch.setattr(os, "environ", ranks.copy())
        share_gpus()
        assert os.environ["LOCAL_RANK"] == local_rank
        assert os.environ.get("NCCL_HOSTID") == ("rank7" if num_gpus in (1, 2) else None)


def test_a_layout_that_makes_no_sense_is_refused() -> None:
    bad = ("zero3", "fsdp", "hsdp4", "tp2x2", "tp0", "fsdp2,hsdp2x2", "single,tp2", "fsdp2 --a.b 3")
    for text in bad:
        with pytest.raises(ConfigError):
            parse_layout(text)


def rows(losses: Sequence[float | None], **figures: float) -> list[dict[str, Any]]:
    both = {"grad_norm": 2.0, **figures}
    return [{"step": i, "loss": loss, **both} for i, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("losses", "beyond"),
    [
        *(([4.0, second], {}) for second in (3.0, 3.00002)),
        *(([4.0, second], {"loss": 2}) for second in (3.1, math.nan, None)),
        ([4.0], {"loss": 2, "grad_norm": 2}),
    ],
)
def test_the_first_step_beyond_the_tolerance(losses, beyond):
    tolerances = {"loss": 1e-5, "grad_norm": 1e-4}
    compared = gaps.compare_rows(rows([4.0, 3.0]), rows(losses), tolerances=tolerances)
    assert {key: gap.beyond[0][0] for key, gap in compared.items() if gap.beyond} == beyond


def test_a_figure_of_the_data_must_be_equal() -> None:
    exact = dict.fromkeys(gaps.TOLERANCES, 1.0)
    a, b = rows([1.0], **exact), rows([1.0], **{**exact, "valid_token_fraction": 1.0 + 2**-52})
    assert [bool(gaps.compare_rows(a, x)["valid_token_fraction"].beyond) for x in (a, b)] == [0, 1]


def test_tensors_are_compared_with_movement_or_norm() -> None:
    start = {"w": torch.tensor([3.0, 4.0]), "v": torch.tensor([1e3, 1e3])}
    a = {"w": torch.tensor([4.0, 4.0]), "v": torch.tensor([1e3, 1e3 + 1])}
    b = {"w": torch.tensor([4.0, 4.1]), "v": torch.tensor([1e3, 1e3 + 1])}
    assert gaps.compare_weights(start, a, b) == (pytest.approx(0.1), "w")
    assert gaps.compare_weights(start, a, a).largest == 0
    still = {**a, "v": start["v"]}  # no rounding explains that it moves
    assert gaps.compare_weights(start, still, a) == (math.inf, "v")
    a = {"w": torch.tensor([3.0, 4.0]), "tiny": torch.tensor([1e-9, 0.0])}
    b = {"w": torch.tensor([3.0, 4.01]), "tiny": torch.tensor([0.0, 1e-9])}
    assert gaps.compare_gradients(a, b) == (pytest.approx(0.01 / 5, rel=1e-4), "w")
    # where all terms cancel only rounding is left: it is compared with LEAST_SHARE of the whole
    assert gaps.compare_gradients(a, {**b, "w": a["w"]}).largest == pytest.approx(2**0.5 * 2e-5)

    ones, zeros = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
    more = ({}, {"w": torch.ones(3)}, {**ones, "v": torch.ones(1)}, {"w": torch.ones(2) / 0})
    for other in more:  # these cannot be compared
        assert gaps.compare_weights(zeros, ones, other).largest == math.inf
        assert gaps.compare_gradients(ones, other).largest == math.inf


NORM = "layers.1.ffn_norm.weight"


def recorded(job: list[str], plant: str) -> None:
    """Train, with a mistake; what it must not train is frozen."""
    run = jobs.start(job)
    right, named = run.execution, dict(run.model.named_parameters())
    if plant != "frozen that trains":
        named["norm.weight"].requires_grad_(False)

    class Planted:
        owns_loss, evaluate, after_update = right.owns_loss, right.evaluate, right.after_update

        def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
            if plant != "missing sum":
                loss = right.forward_backward(batches, divisor=divisor)
            else:  # of one parameter, over all microbatches but the last
                loss = right.forward_backward(batches[:-1], divisor=divisor)
                named[NORM].grad = None
                loss = loss + right.forward_backward(batches[-1:], divisor=divisor)
            if plant == "scaled tensor":
                grad = named[NORM].grad
                assert grad is not None
                grad *= 1.001
            return loss

    folder = Path(load_config(job).job.dump_folder)
    run = record_gradients(replace(run, execution=Planted()), folder=folder / "g", num_steps=1)
    trainer = Trainer(run)
    trainer.train()
    trainer.close()


@pytest.fixture(scope="module")
def right(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("right")
    job = [*jobs.write_job(folder), "--training.steps=1", "--training.local_batch_size=8"]
    ranks.run(recorded, job, "none", world=1)
    return folder / "run"


@pytest.mark.promise("compare")
@pytest.mark.parametrize("plant", ["none", "missing sum", "scaled tensor", "frozen that trains"])
def test_a_planted_gradient_is_found(plant, right, ranks, tmp_path):
    """In another layout; a mistake in one tensor is seen in neither loss nor norm."""
    job = [*jobs.write_job(tmp_path, cache=right.parent / "cache"), "--training.steps=1"]
    ranks.run(recorded, [*job, "--training.local_batch_size=2"], plant, world=2)
    both = (right, tmp_path / "run")
    gap = gaps.compare_gradients(*(StoredTensors(p / "g" / "step-1", GRADIENTS) for p in both))
    compared = gaps.compare_rows(*map(jobs.read_rows, both))
    assert (gap.largest > gaps.GRADIENTS_TOLERANCE) == (plant != "none"), gap
    if plant in ("scaled tensor", "missing sum"):
        assert gap.name == NORM
    if plant == "scaled tensor":
        assert not any(figure.beyond for figure in compared.values())
        assert gap.largest == pytest.approx(1e-3, rel=0.01)
    if plant == "frozen that trains":
        assert (gap.name, gap.largest) == ("norm.weight", math.inf)


@pytest.mark.promise("compare")
def test_initial_weights_are_compared_by_their_bits() -> None:
    a = {"v": torch.ones(2), "w": torch.zeros(2)}
    assert [*gaps.compare_tensors(a, a)] == []
    for other, name in (({**a, "w": -a["w"]}, "w"), ({"w": a["w"]}, "v")):
        assert [gap[0] for gap in gaps.compare_tensors(a, other)] == [name]
        assert [gap[0] for gap in gaps.compare_tensors(other, a)] == [name]


def compare(folder: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Return the exit code, what is printed, and the stored figures by layout."""
    out, figures = io.StringIO(), folder / "figures.json"
    words = [str(TOML), f"--json={figures}", f"--out={folder / 'out'}", *arguments]
    cache = f"--training.dataset_cache={folder / 'cache'}"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = command.main(["layouts", *words, cache])
    stored = json.loads(figures.read_text()) if figures.is_file() else {"runs": []}
    return code, out.getvalue(), {run["layout"]: run for run in stored["runs"]}


@pytest.mark.long
def test_experts_in_float64(tmp_path: Path) -> None:
    experts = ("--model.name=qwen3_moe", TINY, "--model.vocab_size=264", "--float64", "--steps=2")
    code, said, runs = compare(tmp_path, "fsdp2,ep2", *experts)
    assert code == 0, said
    assert 0 < runs["fsdp2,ep2"]["figures"]["gradients"] < 1e-12


@pytest.mark.promise("compare")
@pytest.mark.long
def test_two_layouts_that_train_the_same(tmp_path: Path) -> None:
    code, said, runs = compare(tmp_path, "fsdp2", TINY, "--steps=2", "--training.max_norm=0.5")
    assert code == 0, said
    assert [run["verdict"] for run in runs.values()] == ["reference", "same"]
    assert [len(run["rows"]) for run in runs.values()] == [2, 2]
    figures = runs["fsdp2"]["figures"]
    assert max(figures["weights"], figures["gradients"]) < 1e-5
    config = load_config([f"--job.config_file={tmp_path}/out/2/run/config.toml"])
    assert config.parallelism.data_parallel_shard_degree == 2
    assert (config.training.global_batch_size, config.training.max_norm) == (16, 0.5)


TINY = "--model.flavor=tiny"
DECAY, SEED = "single --optimizer.weight_decay=0.5", "single --debug.seed=1"
CRASH = "single --optimizer.lr=1e30"


@pytest.mark.promise("compare")
@pytest.mark.slow
def test_planted_mistakes_are_found_and_the_other_layouts_run(tmp_path: Path) -> None:
    """A divergence with its first step, other initial weights, and a run that fails."""
    code, said, runs = compare(tmp_path, "1", CRASH, DECAY, SEED, TINY, "--steps=2")
    assert code == 1
    verdicts = ["FAILED", "DIVERGES at step 2", "DIVERGES at the initial weights"]
    assert [runs[layout]["verdict"] for layout in (CRASH, DECAY, SEED)] == verdicts
    assert "optimizer.lr" in runs[CRASH]["problem"]
    found = [text.partition(":")[0] for _, text in runs[DECAY]["differences"]]
    assert "step 2, loss" in found
    assert not any("valid_token_fraction" in text for text in found)
    for key in ("gradients", "weights"):
        assert f"{DECAY}: {key} of step 2" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["single", "fsdp3"], "global_batch_size"),
        (["single", "ddp2,tp2,ep4", "--model.name=qwen3_moe"], "expert_parallel_degree"),
        (["single", "fsdp2 --training.steps=3"], "training.steps"),
        (["single", "fsdp2 --checkpoint.enable=false"], "checkpoint.enable"),
        (["fsdp2", "--parallelism.tensor_parallel_degree=2"], "tensor_parallel_degree=2"),
        (["fsdp2", "--steps=0"], "--steps"),
        (["fsdp2", "--training.seq_lem=3"], "--training.seq_len"),
        (["fsdp2", f"--out={Path(__file__).parent}"], "--out"),  # never mixed with older runs
    ],
)
def test_mistakes_cost_no_training(arguments: list[str], named: str, tmp_path: Path) -> None:
    code, said, _ = compare(tmp_path, *arguments)
    assert code == 2
    assert named in said
    assert not (tmp_path / "out").exists()


def test_plans_of_layouts() -> None:
    """The reference gives the global batch; local batches shrink where ranks share it."""
    common = [f"--job.config_file={TOML}", "--training.global_batch_size=-1"]
    plans = make_plans(["ddp2", "single", "fsdp8"], common=common)
    sizes = [load_config(arguments).training for _, arguments in plans]
    assert [training.global_batch_size for training in sizes] == [16, 16, 16]
    assert [training.local_batch_size for training in sizes] == [8, 8, 2]


def test_a_layout_that_takes_too_long_has_failed(tmp_path: Path) -> None:
    code, _, runs = compare(tmp_path, "fsdp2", "--steps=100000", "--timeout=1")
    assert code == 1
    assert [run["verdict"] for run in runs.values()] == ["FAILED"]  # the others are not trained


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started, and theirs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (child, *children_of(child))]


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the ranks in /proc")
def test_ranks_end_with_the_command(tmp_path: Path) -> None:
    words = [str(TOML), "fsdp2", "fsdp2", TINY, "--steps=5000", f"--out={tmp_path / 'out'}"]
    python = f"{sys.prefix}/bin/python"  # a process that starts warm has other parents
    command = [python, "-m", "torchtitan", "compare", "layouts", *words]
    process = subprocess.Popen([*command, f"--training.dataset_cache={tmp_path}"])
    while not (tmp_path / "out" / "1" / "run" / "metrics.jsonl").is_file():
        assert process.poll() is None
        time.sleep(0.1)
    started = children_of(process.pid)
    assert len(started) >= 3
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    end = time.monotonic() + 10
    while left := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)
