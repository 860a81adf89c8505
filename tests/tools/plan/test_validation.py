"""A validation in the account: below a step of as many tokens, above it with more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import pipeline
from tests.tools.plan.jobs import planned, recorded
from tests.tools.plan.test_account import (
    DIM,
    HIDDEN,
    PARAMETERS,
    RECOMPUTED,
    SEQUENCE,
    TENSORS,
    VOCAB,
)
from torchtitan.tools.plan.account import Account, replay
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.ranks import rehearse_rank

pytestmark = pytest.mark.slow

VALIDATES = "--validation.enable=true"
BATCH = "--validation.local_batch_size="
SMALL = 10240
"""Bytes of rotations of the 64 positions, and of scalars."""


def peak(account: Account) -> int:
    return sum(account.by_purpose.values())


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (4, ("--parallelism.tensor_parallel_degree=2",)),
        (2, ("--model.num_layers=4", "--training.local_batch_size=4", *pipeline("ZBVZeroBubble"))),
    ],
)
def test_a_validation_of_the_same_tokens_needs_less(world: int, settings: tuple[str, ...]) -> None:
    alone, account = (
        replay(recorded(*settings, *validates, world=world)) for validates in ((), (VALIDATES,))
    )
    assert (account.active, account.peak, account.by_purpose) == (
        alone.active,
        alone.peak,
        alone.by_purpose,
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
    is made from. Of a block: the stream, what was added to it, its norm, three
    hidden products, and the label.
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
    assert account.piece[1:] == ("validation", None if is_head else 0)


@pytest.mark.long
def test_each_microbatch_is_validated(tmp_path: Path) -> None:
    """A step is rehearsed with as few as fill the pipeline; a validation keeps what a stage sends
    of each, beside its ids, labels and positions."""
    num, accounts = 48, []
    for batch in (num, 2 * num):
        arguments = ("--model.num_layers=4", *pipeline("1F1B"), RECOMPUTED, VALIDATES)
        job = planned(tmp_path, *arguments, f"--training.local_batch_size={batch}", world=2)
        assert job.shortened.config.training.local_batch_size < num
        accounts.append(replay(rehearse_rank(job, 0)))
        assert accounts[-1].piece[1:][0] == "validation"
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
