"""Another number of ranks, batch or accumulation: the very next sample of the order follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.sample_log import hash_tokens
from tests.distributed import jobs
from tests.distributed.jobs import samples
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_intentions import CONTINUE
from tests.finetune.chats import write_lines

pytestmark = pytest.mark.slow

BATCH = ("--training.local_batch_size=2", "--training.global_batch_size=12")
LOGGED = "--training.callbacks=examples.sample_log:SampleLog"


def hashes_of_the_order(job: list[str], count: int) -> list[str]:
    run = jobs.start(job)
    return [hash_tokens(run.loader.dataset[k]["tokens"]) for k in range(count)]


@pytest.mark.promise("data-order", "resume-elsewhere")
def test_dp_2_4_1_3_draws_the_same_samples(ranks: RankPool, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    whole = [*jobs.write_job(tmp_path, name="whole", cache=cache), *BATCH, LOGGED]
    [through] = ranks.run(jobs.train, [*whole, "--training.steps=4"], world=1)
    job = [*jobs.write_job(tmp_path, name="moved", cache=cache), *BATCH, LOGGED]
    threes = "--training.local_batch_size=3"
    for world, steps, more in ((2, 1, []), (4, 2, [threes]), (1, 3, []), (3, 4, [])):
        result, *_ = ranks.run(jobs.train, [*job, f"--training.steps={steps}", *more], world=world)
    drawn = samples(tmp_path / "moved")
    assert [number for number, _, _ in drawn] == list(range(4 * 12))
    assert drawn == samples(tmp_path / "whole")
    [order] = ranks.run(hashes_of_the_order, [*whole, "--training.steps=4"], 4 * 12, world=1)
    assert [digest for _, _, digest in drawn] == order
    assert len(set(order)) == 4 * 12
    for ours, theirs in zip(result.rows, through.rows, strict=True):
        assert ours["step"] == theirs["step"]
        assert abs(ours["loss"] - theirs["loss"]) < 1e-5


@pytest.mark.promise("resume-elsewhere")
def test_another_batch_goes_on_at_the_next_sample(ranks: RankPool, tmp_path: Path) -> None:
    job, counts = [*jobs.write_job(tmp_path), LOGGED], (8, 4, 12)
    for step, (world, local) in enumerate(((2, 2), (1, 4), (3, 1)), start=1):
        new = [f"--training.local_batch_size={local}", f"--training.steps={step}"]
        new += [f"--training.global_batch_size={counts[step - 1]}", *[CONTINUE] * (step > 1)]
        ranks.run(jobs.train, [*job, *new], world=world)
    drawn = samples(tmp_path / "run")
    assert [number for number, _, _ in drawn] == list(range(sum(counts)))
    assert [step for _, step, _ in drawn] == [
        step for step, count in enumerate(counts, start=1) for _ in range(count)
    ]


@pytest.mark.promise("resume-elsewhere")
def test_packed_examples_go_on_in_the_middle_of_an_epoch(ranks: RankPool, tmp_path: Path) -> None:
    """Also over its end; each example is drawn once an epoch, whichever ranks are there."""
    values: list[object] = [
        {"prompt": f"{i}" * (1 + i % 7), "completion": "ab"[i % 2] * (1 + i * i % 9)}
        for i in range(60)
    ]
    packed = (
        "--training.dataset=examples",
        f"--training.dataset_path={write_lines(tmp_path / 'a.jsonl', values)}",
        "--training.packing=packed",
        "--training.attn_mask_type=block_causal",
        *BATCH,
        LOGGED,
    )
    cache = tmp_path / "cache"
    job = [*jobs.write_job(tmp_path, name="moved", cache=cache), *packed]
    for world, steps in ((2, 1), (3, 2), (1, 4)):
        ranks.run(jobs.train, [*job, f"--training.steps={steps}"], world=world)
    drawn = samples(tmp_path / "moved")
    [(order, epoch)] = ranks.run(order_and_epoch, [*job, "--training.steps=4"], 4 * 12, world=1)
    assert epoch % 12  # the second step is in the middle of an epoch, and goes over its end
    assert 12 < epoch < 24
    assert [(number, step) for number, step, _ in drawn] == [(k, 1 + k // 12) for k in range(48)]
    assert [digest for _, _, digest in drawn] == order
    assert len(set(order)) == epoch


def order_and_epoch(job: list[str], count: int) -> tuple[list[str], int]:
    dataset = jobs.start(job).loader.dataset
    return [hash_tokens(dataset[k]["tokens"]) for k in range(count)], dataset.sources[0].num_samples
