"""A validation's forward passes in the account: below a step of as many tokens, above it with more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pipeline_jobs import pipeline
from tests.plan.jobs import TINY, planned
from tests.plan.test_unroll import IN_4, LAYOUTS, layers
from torchtitan.plan.__main__ import main
from torchtitan.plan.account import Account, replay
from torchtitan.plan.records import follow
from torchtitan.plan.rehearse import find_templates, rehearse, rehearse_step
from torchtitan.plan.unroll import unroll

DIM, VOCAB, SEQUENCE = 32, 264, 64
VALIDATES = "--validation.enable=true"
SPLIT = {  # their backward is of no matter here
    "pp ZBV": (2, 0, (layers(10), IN_4, *pipeline("ZBVZeroBubble"))),
    "pp DualPipeV": (2, 1, (layers(10), IN_4, *pipeline("DualPipeV"))),
}
RECOMPUTED = "--activation_checkpoint.mode=full"
NUMBERS = 64
"""Bytes per token of ids, labels and what the loss has beside logits, at most."""


def peak(account: Account) -> int:
    return sum(account.by_kind.values())


@pytest.mark.parametrize("name", [*LAYOUTS, *SPLIT])
def test_the_same_tokens_need_less_than_a_step(name: str, tmp_path: Path) -> None:
    world, rank, arguments = (LAYOUTS | SPLIT)[name]
    config, layout = planned(tmp_path, *arguments, VALIDATES, world=world)
    templates, left_out = find_templates(config, layout=layout, rank=rank)
    full = rehearse(config, layout=layout, rank=rank, validates=True)
    if name in LAYOUTS:
        few = rehearse(config, layout=layout, rank=rank, left_out=left_out, validates=True)
        assert unroll(few, templates) == full
    step = rehearse(config, layout=layout, rank=rank)
    alone, both = (replay(found, expandable=True) for found in (step, follow(step, full)))
    assert peak(replay(full, expandable=True)) < peak(alone)
    assert (both.active, both.reserved, both.where) == (alone.active, alone.reserved, alone.where)
    assert both.by_kind == alone.by_kind


@pytest.mark.parametrize(
    "larger",
    [
        lambda times: f"--validation.local_batch_size={8 * times}",
        lambda times: f"--validation.seq_len={SEQUENCE * times}",
    ],
)
def test_more_tokens_make_the_peak(larger: object, tmp_path: Path) -> None:
    """Each with a row of logits, in bfloat16 and float32, and the head's input."""
    assert callable(larger)
    accounts = []
    for times in (8, 16):
        arguments = (layers(3), RECOMPUTED, VALIDATES, larger(times))
        config, layout = planned(tmp_path, *arguments)
        step, validation = (
            rehearse_step(config, layout=layout, rank=0, validates=validates)
            for validates in (False, True)
        )
        accounts.append(replay(follow(step, validation), expandable=True))
        assert accounts[-1].during == ("validation", None)
    growth = (peak(accounts[1]) - peak(accounts[0])) / (8 * 8 * SEQUENCE)
    row = (2 + 4) * VOCAB + 2 * DIM
    assert row < growth <= row + NUMBERS


def answer(capsys: pytest.CaptureFixture[str], command: str, *arguments: str) -> str:
    assert main([command, "--world_size", "2", *arguments]) == 0
    return capsys.readouterr().out


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY)
    job = (f"--job.config_file={file}", RECOMPUTED, layers(3))
    large = (VALIDATES, "--validation.local_batch_size=64")
    text = answer(capsys, "memory", *job, *large)
    assert "The peak of pipeline rank 0 comes in the validation, with aten::" in text
    assert "validation" not in answer(capsys, "memory", *job)
    for command in ("step", "traffic"):
        assert answer(capsys, command, *job, *large) == answer(capsys, command, *job)
