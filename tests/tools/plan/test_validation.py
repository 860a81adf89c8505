"""A validation in the account: below a step of as many tokens, above it with more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pipeline_jobs import pipeline
from tests.tools.plan.jobs import placed, planned
from tests.tools.plan.test_account import (
    DIM,
    HIDDEN,
    NUM_LAYERS,
    PARAMETERS,
    RECOMPUTED,
    SEQUENCE,
    TENSORS,
    VOCAB,
)
from tests.tools.plan.test_unroll import IN_4, LAYOUTS, layers
from torchtitan.tools.plan.account import Account, replay
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.copies import copy_blocks
from torchtitan.tools.plan.records import follow, rehearse_rank
from torchtitan.tools.plan.rehearse import find_templates, rehearse

VALIDATES = "--validation.enable=true"
BATCH = "--validation.local_batch_size="
SPLIT = {  # their backward is of no matter here
    "pp ZBV": (2, 0, (layers(10), IN_4, *pipeline("ZBVZeroBubble"))),
    "pp DualPipeV": (2, 1, (layers(10), IN_4, *pipeline("DualPipeV"))),
}
SMALL = 8192
"""Bytes of rotations of the 64 positions, and of scalars."""


def peak(account: Account) -> int:
    return sum(account.by_kind.values())


@pytest.mark.parametrize(
    "name", ["fsdp x tp, stream copied", "pp, last rank", "experts dealt out, tp"]
)
def test_unrolled_equals_full(name: str, tmp_path: Path) -> None:
    world, rank, arguments = LAYOUTS[name]
    config, layout = placed(tmp_path, *arguments, VALIDATES, world=world)
    templates, skipped = find_templates(config, layout=layout, rank=rank)
    few = rehearse(config, layout=layout, rank=rank, skipped=skipped, validates=True)
    full = rehearse(config, layout=layout, rank=rank, validates=True)
    assert copy_blocks(few, templates) == full


@pytest.mark.parametrize("name", ["fsdp x tp, stream copied", "pp, last rank", *SPLIT])
def test_the_same_tokens_need_less_than_a_step(name: str, tmp_path: Path) -> None:
    world, rank, arguments = (LAYOUTS | SPLIT)[name]
    config, layout = placed(tmp_path, *arguments, VALIDATES, world=world)
    step, validation = (
        rehearse(config, layout=layout, rank=rank, validates=validates)
        for validates in (False, True)
    )
    both = follow(step, validation)
    alone, account = (replay(found) for found in (step, both))
    assert peak(replay(validation)) < peak(alone)
    assert (account.active, account.where, account.by_kind) == (
        alone.active,
        alone.where,
        alone.by_kind,
    )


@pytest.mark.parametrize(
    ("samples", "chunks", "is_head"),
    [(64, 0, True), (64, 2, True), (64, 4, False), (1024, 0, False)],
)
def test_more_tokens_make_the_peak(
    samples: int, chunks: int, is_head: bool, tmp_path: Path
) -> None:
    """The larger of the head, by the loss's code, and of a block, by the feed-forward's.

    A token of the head: its input, label and loss. Of a chunk beside them: logits in
    bfloat16 and float32, two labels, a maximum, two sums, two losses, three masks and what the
    loss is made from. Of a block: the stream, what was added to it and its norm, three hidden
    products, and the label.
    """
    arguments = (NUM_LAYERS, RECOMPUTED, VALIDATES, f"--training.loss_chunks={chunks}")
    job = planned(tmp_path, *arguments, f"{BATCH}{samples}")
    account = replay(rehearse_rank(job, 0))
    tokens = samples * SEQUENCE
    few = 2**24 // VOCAB
    chunk = tokens // (chunks or 1) if chunks or tokens <= few else 512
    token = 2 * DIM + 8 + 4
    head = tokens * token + chunk * ((2 + 4) * VOCAB + 2 * 8 + 4 + 2 * 4 + 2 * 4 + 3 + 4)
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
    job = (f"--job.config_file={tmp_path / 'job.toml'}", RECOMPUTED, NUM_LAYERS)
    large = (VALIDATES, f"{BATCH}64")
    text = answer(capsys, "memory", *job, *large)
    assert "in the validation, with aten::" in text
    assert "validation" not in answer(capsys, "memory", *job)
    for command in ("step", "traffic"):
        assert answer(capsys, command, *job, *large) == answer(capsys, command, *job)
