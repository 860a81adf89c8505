"""Choices of experts, written down in one layout, compared with another's and replayed there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.pipeline_jobs import strong_weights
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_experts import MOE
from tests.jobs import COPIED, ODD, OPTIONS, TP2, UNSAVED, cp, ep, pipeline
from torchtitan.models.interface import RouterModule
from torchtitan.models.moe import best_experts
from torchtitan.tools.compare.layouts.flips import Flips, compare_choices
from torchtitan.tools.compare.layouts.routing import (
    CHOICES,
    Record,
    name_tokens,
    read_choices,
    watch_routing,
)
from torchtitan.trainer import Trainer

STEPS = 2
SHORT = ("--model.num_layers=3", f"--training.steps={STEPS}", UNSAVED)


def worst_experts(scores: Tensor, bias: Tensor | None) -> Tensor:
    return best_experts(-scores, num=2)


def watched(
    job: list[str], *, rank: int, into: Path, replayed: Path | None = None, wrong: bool = False
) -> list[dict[str, Any]]:
    """Train, writing down what is chosen; with `wrong` the router chooses the worst."""
    with strong_weights():
        run = jobs.start(job)
    routers = [m for part in run.model for m in part.modules() if isinstance(m, RouterModule)]
    for router in routers if wrong else ():
        router.choose = worst_experts
    trainer = Trainer(watch_routing(run, folder=into, rank=rank, replayed=replayed))
    trainer.train()
    jobs.close(trainer)
    return jobs.read_rows(run_folder(job))


def on_ranks(job: list[str], **options: Any) -> list[dict[str, Any]]:
    return watched(job, rank=torch.distributed.get_rank(), **options)


def run_folder(job: list[str]) -> str:
    return next(w for w in job if w.startswith("--job.dump_folder=")).partition("=")[2]


@pytest.fixture(scope="module")
def reference(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    for name, what in (("even", ()), ("odd", (ODD,))):
        job = [*jobs.write_job(folder, MOE, name=name), *SHORT, *what]
        job += ["--training.local_batch_size=8"]
        ranks.run(on_ranks, job, into=folder / name / CHOICES, world=1)
    return folder


LAYOUTS: dict[str, tuple[int, int, str, tuple[str, ...]]] = {
    "ep 2, recomputed, accumulating": (2, 2, "even", (ep(2), *OPTIONS["recomputed"])),
    "tp 2, stream copied": (2, 8, "odd", (TP2, COPIED, ODD)),
    "cp 2, tp 2": (4, 8, "even", (TP2, *cp(2, "ring"), ep(4))),
    "pp 2": (2, 8, "even", pipeline("1F1B")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.long
def test_each_token_is_found_in_another_layout(
    layout: str, reference: Path, ranks: RankPool, tmp_path: Path
) -> None:
    world, size, name, how = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, MOE, cache=reference / "cache"), *SHORT, *how]
    job += [f"--training.local_batch_size={size}"]
    ours, theirs = tmp_path / CHOICES, reference / name / CHOICES
    ranks.run(on_ranks, job, into=ours, replayed=theirs, world=world)
    found = compare_choices(theirs, ours, num_steps=STEPS)
    assert (found.problem, found.num_flips, found.first_step) == ("", 0, None)
    seq_len = 41 if name == "odd" else 32
    assert found.num_choices == 2 * STEPS * 8 * seq_len
    for a, b in zip(*(read_choices(x, STEPS).values() for x in (theirs, ours)), strict=True):
        torch.testing.assert_close(a["scores"], b["scores"], rtol=0, atol=1e-5)


def test_a_wrong_choice_is_seen_and_replaced(
    reference: Path, ranks: RankPool, tmp_path: Path
) -> None:
    """Replayed, the training is right, and what was chosen is seen to be wrong in every layer."""
    rows, found = {}, {}
    for kind, replayed in (("free", None), ("replayed", reference / "even" / CHOICES)):
        job = [*jobs.write_job(tmp_path, MOE, name=kind, cache=reference / "cache"), *SHORT]
        into, wrong = tmp_path / kind / CHOICES, partial(on_ranks, wrong=True, replayed=replayed)
        [rows[kind], _] = ranks.run(wrong, job, into=into, world=2)
        found[kind] = compare_choices(reference / "even" / CHOICES, into, num_steps=STEPS)
    right = jobs.read_rows(reference / "even")
    for kind, is_right in (("free", False), ("replayed", True)):
        losses = [[row["loss"] for row in each] for each in (rows[kind], right)]
        assert (losses[0] == pytest.approx(losses[1], rel=1e-5)) == is_right
        assert found[kind].first_step == 1
        assert found[kind].complaint


def record(folder: Path, *steps: Record) -> Path:
    for step, layers in enumerate(steps, start=1):
        (folder / f"step-{step}").mkdir(parents=True)
        torch.save(layers, folder / f"step-{step}" / "rank-0.pt")
    return folder


def layer(scores: list[list[float]], ids: list[list[int]]) -> dict[str, Tensor]:
    return {
        "names": torch.arange(len(ids)),
        "scores": torch.tensor(scores),
        "ids": torch.tensor(ids),
    }


def flips(folder: Path, a: list[Record], b: list[Record], **options: Any) -> Flips:
    stored = [record(folder / name, *steps) for name, steps in (("a", a), ("b", b))]
    return compare_choices(*stored, num_steps=len(a), **options)


NEAR = [[0.4, 0.3, 0.300001, 0.0], [0.1, 0.2, 0.3, 0.4]]
RIGHT, FLIPPED = layer(NEAR, [[0, 2], [3, 2]]), layer(NEAR, [[1, 0], [2, 3]])


def test_a_near_tie_is_no_complaint_and_its_margin_is_told(tmp_path: Path) -> None:
    found = flips(tmp_path, [{"1": RIGHT}] * 2, [{"1": RIGHT}, {"1": FLIPPED}])
    assert (found.num_flips, found.first_step, found.complaint) == (1, 2, "")
    assert found.largest_margin == pytest.approx(1e-6, rel=0.1)
    assert found.num_choices == 4


def test_a_flip_against_a_margin_is_found_in_its_layer(tmp_path: Path) -> None:
    far = layer(NEAR, [[0, 2], [0, 2]])
    found = flips(tmp_path, [{"1": RIGHT, "2": RIGHT}], [{"1": FLIPPED, "2": far}])
    assert found.complaint
    assert (found.layer, found.first_step) == ("2", 1)
    assert found.largest_margin == pytest.approx(0.3)


def test_a_token_that_is_not_routed_once(tmp_path: Path) -> None:
    twice = {key: torch.cat([x, x[:1]]) for key, x in RIGHT.items()}
    found = flips(tmp_path, [{"1": RIGHT}], [{"1": twice}])
    assert found.complaint == found.problem != ""


def test_the_margin_between_groups_is_that_of_their_scores(tmp_path: Path) -> None:
    """Two groups that nearly tie by their best two, of experts that do not."""
    a, b = [[0.9, 0.1, 0.5, 0.500001]], [[0.9, 0.1, 0.5, 0.499999]]
    one = [{"1": layer(a, [[3]])}], [{"1": layer(b, [[0]])}]
    assert flips(tmp_path / "no", *one).largest_margin == pytest.approx(0.4, rel=1e-3)
    found = flips(tmp_path / "groups", *one, groups=(2, 1))
    assert found.largest_margin == pytest.approx(1e-6, rel=0.2)


def test_names_are_of_samples_and_places() -> None:
    tokens = torch.arange(8).view(2, 4)
    samples = {"tokens": tokens, "labels": tokens + 1}
    names = name_tokens(samples)
    assert names.unique().numel() == 8
    turned = name_tokens({key: x.flip(0) for key, x in samples.items()})
    assert turned.equal(names.flip(0))
    assert not name_tokens({**samples, "labels": tokens}).equal(names)


def test_read_choices_joins_ranks(tmp_path: Path) -> None:
    parts = [{"1": {key: x[i : i + 1] for key, x in RIGHT.items()}} for i in (1, 0)]
    (tmp_path / "step-1").mkdir()
    for rank, part in enumerate(parts):
        torch.save(part, tmp_path / "step-1" / f"rank-{rank}.pt")
    assert read_choices(tmp_path, 1)["1"]["ids"].equal(RIGHT["ids"])
