"""Steps trained again: what was logged comes out, and what was changed since is found."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.tools.audit.campaign import SETTINGS, write_data
from tests.tools.audit.replay_campaign import JOB, MORE_LAYOUTS, check
from torchtitan.tools.audit import command as audit

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("warm_starts"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]


def train(ranks: RankPool, folder: Path, kind: str, layout: str, *more: str) -> Path:
    if not (folder / "a.jsonl").exists():
        write_data(folder)
    world, degrees = MORE_LAYOUTS[layout]
    there = [re.sub('"(?=[a-z])', f'"{folder}/', word) for word in SETTINGS[kind]]
    job = [*JOB, *there, *degrees, f"--training.dataset_cache={folder}/cache"]
    ranks.run(jobs.train, [*job, f"--job.dump_folder={folder}/run", *more], world=world)
    return folder / "run"


@pytest.mark.parametrize(
    ("kind", "layout", "alone"),
    [("packed", "dp 2", True), ("mixed", "pp 2", False), ("padded", "cp 2", False)],
)
def test_a_replayed_step_is_the_one_that_was_trained(
    kind: str, layout: str, alone: bool, ranks: RankPool, tmp_path: Path
) -> None:
    check(train(ranks, tmp_path, kind, layout), alone=alone)


def test_verify_finds_a_figure_and_a_byte_that_were_changed(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # what is not run again is not compared
    measured = ("--validation.enable", "--validation.dataset=synthetic", "--validation.steps=1")
    run = train(ranks, tmp_path, "mixed", "one device", *measured, "--validation.freq=1")
    verify = ["verify", str(run), "--steps=2"]
    assert audit.main(verify) == 0
    assert "equal to the log" in capsys.readouterr().out

    metrics = run / "metrics.jsonl"
    logged = metrics.read_text()
    rows = [json.loads(line) for line in logged.splitlines()]
    rows[2]["grad_norm"] *= 1 + 1e-6
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert audit.main([*verify, "--steps=4"]) == 1
    assert "different; first: step 3, grad_norm" in capsys.readouterr().out
    metrics.write_text(logged)

    checkpoint = run / "checkpoint" / "step-2"
    manifest = checkpoint / "manifest.json"
    written = manifest.read_text()
    manifest.write_text(written + "\n")
    assert audit.main([*verify, "--steps=0"]) == 1
    said = capsys.readouterr().out
    assert "step-2" in said
    assert "manifest" in said
    manifest.write_text(written)

    weights = next(path for path in (checkpoint / "model").iterdir() if path.suffix == ".distcp")
    os.chmod(weights, 0o644)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert audit.main([*verify, "--steps=2"]) == 1
    said = capsys.readouterr().out
    assert re.search(r"step-2: model/\S+ is damaged", said)
    assert "steps 1 to 2: " in said  # what can be trained again still is


def test_mistakes(ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(ranks, tmp_path, "mixed", "one device", "--checkpoint.keep_latest_k=2")
    for arguments, said in {
        ("verify", str(run), "--steps=9"): "--steps",
        ("explain", str(run), "--step=1", "--out=x"): "--replay",
        ("explain", str(run), "--step=9", "--replay"): "9",
        ("explain", str(run), "--step=1", "--replay", "--model.wings=2"): "wings",
        ("verify", str(tmp_path)): "config.toml",
    }.items():
        assert audit.main(list(arguments)) == 2
        assert said in capsys.readouterr().err
