"""Experts are balanced alike in every layout, and a resumed run goes on bit for bit.

Counts are integers and biases follow from them, so both are compared bit for bit; gradients of
every parameter to rounding, in the first step and in one whose losses go by counts of another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.pipeline_jobs import pipeline
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_experts import CHUNKS, MOE, WITHIN, ep
from tests.distributed.test_matrix import COPIED, HOW, TP2, cp
from tests.distributed.test_resume import exact
from torchtitan.base.errors import NonFiniteError
from torchtitan.models import qwen3_moe
from torchtitan.models.init import Init, Normal
from torchtitan.models.interface import HeadLoss
from torchtitan.optim import balance as module
from torchtitan.optim.balance import Balance
from torchtitan.parallel.execution import Batch
from torchtitan.trainer import Run, Trainer

STEPS = 4
BALANCED = (
    "--model.expert_bias=true",
    "--router.bias_update_rate=0.01",
    "--router.sequence_loss_weight=0.5",
    "--router.global_loss_weight=0.5",
    "--router.z_loss_weight=0.05",
    "--router.log_layers",
    "--training.seq_len=40",
    f"--training.steps={STEPS}",
)
PADDED = ("--training.dataset=synthetic_examples", "--training.seq_len=180")
LOSSES = tuple(f"router/{name}" for name in module.LOSSES)


@contextmanager
def strong_routers() -> Iterator[None]:
    """Let experts start so large that they matter, and routers so that few choices nearly tie."""
    correct = qwen3_moe.Qwen3MoE.initial

    def initial(self: qwen3_moe.Qwen3MoE, name: str) -> Init:
        is_strong = ".moe." in name and not name.endswith("expert_bias")
        return Normal(std=0.3) if is_strong else correct(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3_moe.Qwen3MoE, "initial", initial)
        yield


@dataclass(frozen=True)
class Balanced:
    """What a rank tells of its part."""

    rows: list[dict[str, Any]]
    biases: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    """Of the first step and of the third, before clipping."""
    last_counts: Tensor


def train(job: list[str]) -> Balanced:
    with strong_routers(), jobs.changed_flavor(job, "tiny8", pj.FOUR_LAYERS):
        run = jobs.start(job)
        gradients = _keep_gradients(run)
        trainer = Trainer(run)
        trainer.train()
        trainer.close()
    assert run.balance is not None
    return Balanced(
        rows=_rows(job),
        biases=_biases(run),
        gradients=[gradients[0], gradients[2]] if len(gradients) > 2 else [],
        last_counts=run.balance.state()["router.last_counts"],
    )


def _rows(job: list[str]) -> list[dict[str, Any]]:
    """Of the rank that writes them: others may be done while it does."""
    return jobs.read_rows(pj._argument(job, "--job.dump_folder")) if dist.get_rank() == 0 else []


def _biases(run: Run) -> dict[str, Tensor]:
    found = {name: p for name, p in run.model.named_parameters() if name.endswith("expert_bias")}
    assert all(type(p.data) is Tensor and p.dtype == torch.float32 for p in found.values())
    return {name: p.detach().clone() for name, p in found.items()}


def _keep_gradients(run: Run) -> list[dict[str, Tensor]]:
    gradients: list[dict[str, Tensor]] = []
    plain = run.execution.forward_backward

    def keeping(batches: Iterable[Batch], *, divisor: Tensor) -> Tensor:
        loss = plain(list(batches), divisor=divisor)
        named = run.model.named_parameters()
        gradients.append({name: jobs.full(p.grad) for name, p in named if p.requires_grad})
        return loss

    run.execution.forward_backward = keeping  # type: ignore[method-assign]
    return gradients


def counts_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return router_figures(rows, "router/counts/")


def router_figures(rows: list[dict[str, Any]], prefix: str = "router/") -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key.startswith(prefix)} for row in rows]


def find_differences(results: list[Balanced], reference: Balanced) -> set[str]:
    """Name what is not as on one device."""
    wrong = set()
    rows = results[0].rows
    if counts_of(rows) != counts_of(reference.rows):
        wrong.add("counts")
    if not all(result.last_counts.equal(reference.last_counts) for result in results):
        wrong.add("last counts")
    biases = {name: bias for result in results for name, bias in result.biases.items()}
    assert biases.keys() == reference.biases.keys()
    for result in results:
        if any(not bias.equal(reference.biases[name]) for name, bias in result.biases.items()):
            wrong.add("biases")
    for ours, theirs in zip(rows, reference.rows, strict=True):
        for key in ("loss", "grad_norm", "router/entropy", *LOSSES):
            if ours[key] != pytest.approx(theirs[key], rel=1e-4):
                wrong.add(key)
    for number, wanted in enumerate(reference.gradients):
        found = {name: g for result in results for name, g in result.gradients[number].items()}
        assert found.keys() == wanted.keys()
        for name, gradient in found.items():
            if (gradient - wanted[name]).norm() > 1e-4 * wanted[name].norm():
                wrong.add(f"gradient {2 * number + 1}")
    return wrong


# ranks, samples of a rank and microbatch, what is trained, where and how
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...], tuple[str, ...]]] = {
    "one device, accumulating": (1, 2, (), ()),
    "one device, recomputed": (1, 8, (), HOW["recomputed"]),
    "fsdp 2, by operator": (2, 2, (), HOW["by operator"]),
    "fsdp 2, compiled, recomputed": (2, 4, (), (*HOW["compiled"], *HOW["recomputed"])),
    "hsdp 2x2, offloaded": (4, 2, (), (*jobs.HSDP, *HOW["offloaded"])),
    "cp 2, ring, recomputed": (2, 4, (), (*cp(2, "ring"), *HOW["recomputed"])),
    "cp 2, fsdp 2, documents": (4, 4, WITHIN, cp(2, "allgather")),
    "pp 2, ZBV": (2, 4, (), pipeline("ZBVZeroBubble")),
    "pp 2, cp 2, interleaved, recomputed": (
        4,
        4,
        (),
        (*pipeline("Interleaved1F1B"), *cp(2, "ring"), *HOW["recomputed"]),
    ),
    "tp 2": (2, 8, (), (TP2,)),
    "tp 2, cp 2": (4, 8, (), (TP2, *cp(2, "ulysses"))),
    "tp 2, stream copied, odd tokens": (2, 8, CHUNKS, (TP2, COPIED, *HOW["recomputed"])),
    "ep 2, half recomputed": (2, 4, (), (ep(2), *HOW["half recomputed"])),
    "ep 4, tp 2, fsdp 2": (4, 4, (), (TP2, ep(4))),
    "ep 2, pp 2, DualPipeV": (4, 4, (), (*pipeline("DualPipeV"), ep(2))),
    "padding; one device, accumulating, recomputed": (1, 2, PADDED, HOW["recomputed"]),
    "padding; cp 2, pp 2": (4, 4, PADDED, (*cp(2, "ring"), *pipeline("ZBVZeroBubble"))),
    "padding; ep 2, tp 2, stream copied": (2, 4, PADDED, (TP2, COPIED, ep(2), *HOW["recomputed"])),
}


def reference_of(on_one_device: OneDevice, what: tuple[str, ...]) -> Balanced:
    found: Balanced = on_one_device(
        train, *BALANCED, *what, "--training.local_batch_size=8", toml=MOE
    )
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_balance(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    world, size, what, how = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *BALANCED, *what, *how, jobs.UNSAVED]
    job += [f"--training.local_batch_size={size}"]
    results = ranks.run(train, job, world=world)
    assert find_differences(results, reference_of(on_one_device, what)) == set()


def test_the_reference_is_balanced(on_one_device: OneDevice) -> None:
    """Biases and losses do something in what layouts are compared with."""
    found = reference_of(on_one_device, ())
    assert set(found.biases) == {f"layers.{n}.moe.expert_bias" for n in (1, 2, 3)}
    assert all(bias.abs().max() > 0.02 for bias in found.biases.values())
    tokens = {sum(counts) for row in counts_of(found.rows) for counts in row.values()}
    assert tokens == {8 * 40 * 2}
    assert found.rows[0]["router/global_loss"] != found.rows[1]["router/global_loss"]
    plain = on_one_device(
        train, *BALANCED, *(f"--router.{one}_weight=0.0" for one in module.LOSSES[::2]), toml=MOE
    )
    name = "layers.1.moe.router.gate.weight"
    ours, theirs = found.gradients[0][name], plain.gradients[0][name]
    assert (ours - theirs).norm() > 0.1 * ours.norm()


def test_what_only_fills_samples_up_is_not_counted(on_one_device: OneDevice) -> None:
    found = reference_of(on_one_device, PADDED)
    data: list[Tensor] = on_one_device(lengths, *BALANCED, *PADDED, toml=MOE)
    num_text = [int(of_step.sum()) for of_step in data]
    assert all(0 < number < 0.9 * 8 * 180 for number in num_text)
    counted = [{sum(counts) for counts in row.values()} for row in counts_of(found.rows)]
    assert counted == [{2 * number} for number in num_text]


def lengths(job: list[str]) -> list[Tensor]:
    run = jobs.start([*job, "--training.local_batch_size=8"])
    found = [torch.cat([one["length"] for one in next(run.loader)]) for _ in range(STEPS)]
    Trainer(run).close()
    return found


# --- resuming


def train_strongly(job: list[str]) -> tuple[jobs.Result, Tensor]:
    with strong_routers(), jobs.changed_flavor(job, "tiny8", pj.FOUR_LAYERS):
        run = jobs.start(job)
        trainer = Trainer(run)
        trainer.train()
        trainer.close()
        assert run.balance is not None
        final = {name: jobs.full(p) for name, p in run.model.named_parameters()}
        result = jobs.Result(_rows(job), {}, final, jobs.hash_state(run))
        return result, run.balance.state()["router.last_counts"]


RESUMED: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device": (1, ()),
    "fsdp 2, async": (2, ("--checkpoint.async_mode=async",)),
    "hsdp 2x2, ep 2": (4, (*jobs.HSDP, ep(2), "--training.local_batch_size=2")),
    "pp 2": (2, pipeline("1F1B")),
}


@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_goes_on_bit_for_bit(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    world, how = RESUMED[layout]
    whole, parts = (
        [*jobs.write_job(tmp_path, MOE, name=name, cache=cache), *BALANCED, *how]
        for name in ("whole", "parts")
    )
    through = ranks.run(train_strongly, whole, world=world)
    ranks.run(train_strongly, [*parts, "--training.steps=2"], world=world)
    resumed = ranks.run(train_strongly, parts, world=world)
    for (ours, counts), (theirs, wanted) in zip(resumed, through, strict=True):
        assert exact(ours.rows) == exact(theirs.rows)
        assert router_figures(ours.rows) == router_figures(theirs.rows)
        assert ours.state_hash == theirs.state_hash
        assert counts.equal(wanted)


def test_counts_that_are_not_saved_are_missed(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    """And a checkpoint without them is resumed all the same."""
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *BALANCED]
    whole = [*jobs.write_job(tmp_path, MOE, name="whole", cache=cache), *BALANCED]
    [(through, _)] = ranks.run(train_strongly, whole, world=1)
    ranks.run(train_and_forget, [*job, "--training.steps=2"], world=1)
    [(resumed, _)] = ranks.run(train_strongly, job, world=1)
    assert exact(resumed.rows[:2]) == exact(through.rows[:2])
    assert resumed.rows[2]["loss"] == through.rows[2]["loss"]
    assert resumed.rows[2]["router/global_loss"] != through.rows[2]["router/global_loss"]


def train_and_forget(job: list[str]) -> None:
    """As a version that saves no counts."""
    with pytest.MonkeyPatch.context() as patch, strong_routers():
        patch.setattr(Balance, "state", lambda self: {})
        with jobs.changed_flavor(job, "tiny8", pj.FOUR_LAYERS):
            jobs.train(job)


def begin(job: list[str]) -> tuple[dict[str, Tensor], Tensor]:
    with jobs.changed_flavor(job, "tiny8", pj.FOUR_LAYERS):
        run = jobs.start(job)
    Trainer(run).close()
    assert run.balance is not None
    return _biases(run), run.balance.state()["router.last_counts"]


def test_biases_and_counts_load_into_other_layouts(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *BALANCED]
    (trained, counts), *_ = ranks.run(train_strongly, job, world=2)
    wanted = {name: p for name, p in trained.final.items() if name.endswith("expert_bias")}
    assert all(bias.any() for bias in wanted.values())
    layouts: list[tuple[int, tuple[str, ...]]] = [
        (1, ()),
        (2, pipeline("1F1B")),
        (4, ("--training.local_batch_size=2", ep(2))),
    ]
    for world, how in layouts:
        found = ranks.run(begin, [*job, *how], world=world)
        biases = {name: bias for one, _ in found for name, bias in one.items()}
        assert biases.keys() == wanted.keys()
        assert all(biases[name].equal(bias) for name, bias in wanted.items())
        assert all(last.equal(counts) for _, last in found)


# --- what leaves the balance alone


@pytest.mark.parametrize("world", [1, 2])
def test_biases_stay_float32(world: int, ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *BALANCED, jobs.UNSAVED]
    job += ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]
    found = ranks.run(train, job, world=world)
    for result in found:
        for bias in result.biases.values():  # 0.01 is none in bfloat16
            moves = bias.double() / 0.01
            assert bias.any()
            assert (moves - moves.round()).abs().max() < 1e-5


def test_validation_leaves_it_alone(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    validated = ("--validation.enable", "--validation.freq=1", "--validation.steps=2")
    validated += ("--validation.dataset=synthetic",)
    found = []
    for name, how in {"plain": (), "validated": validated}.items():
        job = [*jobs.write_job(tmp_path, MOE, name=name, cache=cache), *BALANCED, *how]
        found.append(ranks.run(train, [*job, jobs.UNSAVED], world=2)[0])
    plain, other = found
    assert "validation_loss" in other.rows[1]
    assert router_figures(plain.rows) == router_figures(other.rows)
    assert all(bias.equal(other.biases[name]) for name, bias in plain.biases.items())


def train_into_a_bad_step(job: list[str], bad: int) -> tuple[dict[str, Tensor], Tensor]:
    """Train until the loss of a step is not finite."""
    runs: list[Run] = []

    def broken(correct: HeadLoss) -> HeadLoss:
        def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return correct(x, weight, labels) * (math.nan if runs[0].progress.step == bad else 1.0)

        return loss

    with strong_routers(), jobs.changed_flavor(job, "tiny8", pj.FOUR_LAYERS):
        with jobs.other_loss(broken):
            runs.append(jobs.start(job))
        trainer = Trainer(runs[0])
        with pytest.raises(NonFiniteError):
            trainer.train()
        trainer.close()
    assert runs[0].balance is not None
    return _biases(runs[0]), runs[0].balance.state()["router.last_counts"]


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_step_that_is_not_taken_moves_nothing(
    implementation: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    how = (*BALANCED, jobs.UNSAVED, f"--optimizer.implementation={implementation}")
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *how]
    [two] = ranks.run(train, [*job, "--training.steps=2"], world=1)
    [(biases, counts)] = ranks.run(train_into_a_bad_step, job, 3, world=1)
    assert all(bias.equal(two.biases[name]) for name, bias in biases.items())
    assert counts.equal(two.last_counts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--router.z_loss_weight=0.1", "--model.name=llama3"), ["z_loss_weight", "with experts"]),
        (("--router.bias_update_rate=0.1",), ["bias_update_rate", "expert_bias = true"]),
        (
            ("--router.bias_update_rate=0.1", "--model.expert_bias=true", "--lora.rank=4"),
            ["bias_update_rate", "lora.rank = 0"],
        ),
    ],
)
def test_what_cannot_be_is_refused(
    options: tuple[str, ...], parts: list[str], ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), "--model.name=qwen3_moe", *options]
    [message] = ranks.run(jobs.refusal, job, world=1)
    assert all(part in message for part in parts), message


def test_a_frozen_bias_stays(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *BALANCED, jobs.UNSAVED]
    job += ['--optimizer.frozen_params=["layers.2.moe.*"]']
    [result] = ranks.run(train, job, world=1)
    moved = {name: bool(bias.any()) for name, bias in result.biases.items()}
    assert moved == {f"layers.{n}.moe.expert_bias": n != 2 for n in (1, 2, 3)}
