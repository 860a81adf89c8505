"""A validation in the account: below a step of as many tokens, above it with more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import pipeline
from tests.tools.plan.jobs import placed, planned
from tests.tools.plan.test_account import (
    DIM,
    HIDDEN,
    PARAMETERS,
    RECOMPUTED,
    SEQUENCE,
    TENSORS,
    VOCAB,
)
from tests.tools.plan.test_unroll import LAYOUTS, few_of, layers
from torchtitan.tools.plan.account import Account, replay
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.copies import copy_blocks
from torchtitan.tools.plan.records import follow, rehearse_rank
from torchtitan.tools.plan.rehearse import find_templates, rehearse
from torchtitan.tools.plan.tape import Record

pytestmark = pytest.mark.slow

VALIDATES = "--validation.enable=true"
BATCH = "--validation.local_batch_size="
SMALL = 10240
"""Bytes of rotations of the 64 positions, and of scalars."""


def peak(account: Account) -> int:
    return sum(account.by_kind.values())


@pytest.mark.parametrize("name", ["fsdp x tp, stream copied", "pp Interleaved1F1B, last rank"])
def test_unrolled_equals_full_and_needs_less_than_a_step(name: str, tmp_path: Path) -> None:
    world, rank, arguments = LAYOUTS[name]
    config, layout = placed(tmp_path, *arguments, VALIDATES, world=world)
    templates, skipped = find_templates(config, layout=layout, rank=rank)
    few = rehearse(config, layout=layout, rank=rank, skipped=skipped, validates=True)
    full = rehearse(config, layout=layout, rank=rank, validates=True)
    assert copy_blocks(few, templates) == full
    step, templates = few_of(name)
    assert_below(copy_blocks(step, templates), full)


@pytest.mark.parametrize(("schedule", "rank"), [("ZBVZeroBubble", 0), ("DualPipeV", 1)])
def test_halves_of_backwards_are_of_no_matter(schedule: str, rank: int, tmp_path: Path) -> None:
    arguments = (layers(4), "--training.local_batch_size=4", *pipeline(schedule), VALIDATES)
    config, layout = placed(tmp_path, *arguments, world=2)
    step, validation = (
        rehearse(config, layout=layout, rank=rank, validates=validates)
        for validates in (False, True)
    )
    assert_below(step, validation)


def assert_below(step: Record, validation: Record) -> None:
    """Assert that a validation of the same tokens does not change the account of a step."""
    alone, account = replay(step), replay(follow(step, validation))
    assert peak(replay(validation)) < peak(alone)
    assert (account.active, account.where, account.by_kind) == (
        alone.active,
        alone.where,
        alone.by_kind,
    )


@pytest.mark.parametrize(
    ("samples", "chunks", "is_head"),
    [(64, 0, True), (64, 2, True), (1024, 0, False)],
)
def test_more_tokens_make_the_peak(
    samples: int, chunks: int, is_head: bool, tmp_path: Path
) -> None:
    """The larger of the head, by the loss's code, and of a block, by the feed-forward's.

    A token of the head: its input, label and loss. Of a chunk beside them: logits in
    bfloat16 and float32, a label, a maximum, two sums, two losses, two masks and what the loss
    is made from. Of a block: the stream, what was added to it and its norm, three hidden
    products, and the label.
    """
    arguments = (RECOMPUTED, VALIDATES, f"--training.loss_chunks={chunks}")
    job = planned(tmp_path, *arguments, f"{BATCH}{samples}")
    account = replay(rehearse_rank(job, 0))
    tokens = samples * SEQUENCE
    few = 2**24 // VOCAB
    chunk = tokens // (chunks or 1) if chunks or tokens <= few else 512
    token = 2 * DIM + 8 + 4
    head = tokens * token + chunk * ((2 + 4) * VOCAB + 8 + 4 + 2 * 4 + 2 * 4 + 2 + 4)
    head += 2 * VOCAB * DIM  # its weight, in bfloat16
    block = tokens * (3 * 2 * DIM + 3 * 2 * HIDDEN + 8)
    assert (head > block) == is_head
    state = (4 + 8) * PARAMETERS + 4 * TENSORS
    assert 0 <= peak(account) - state - max(head, block) < SMALL
    assert account.during == ("validation", None if is_head else 0)


@pytest.mark.long
def test_each_microbatch_is_validated(tmp_path: Path) -> None:
    """A step is rehearsed with as few as fill the pipeline; a validation keeps what a stage sends
    of each, beside its ids, labels and positions."""
    num, accounts = 48, []
    for batch in (num, 2 * num):
        arguments = (layers(4), *pipeline("1F1B"), RECOMPUTED, VALIDATES)
        job = planned(tmp_path, *arguments, f"--training.local_batch_size={batch}", world=2)
        assert job.shortened.config.training.local_batch_size < num
        accounts.append(replay(rehearse_rank(job, 0)))
        assert accounts[-1].during[0] == "validation"
    growth = (peak(accounts[1]) - peak(accounts[0])) / num
    stream = 2 * DIM * SEQUENCE
    assert stream < growth <= stream + 4 * 8 * SEQUENCE


def answer(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    assert main([command, "--world_size", "2", *arguments]) == 0
    return capsys.readouterr().out


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path)  # writes the file
    job = (f"--job.config_file={tmp_path / 'job.toml'}", RECOMPUTED, "--model.num_layers=1")
    large = (VALIDATES, f"{BATCH}64")
    assert "in the validation, with aten::" in answer(capsys, "memory", *job, *large)
    for command in ("step", "traffic"):
        assert answer(capsys, command, *job, *large) == answer(capsys, command, *job)
