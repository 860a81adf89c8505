"""A run that was stopped, set back and changed is trained again by what its ledger says."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankError, RankPool
from tests.tools.audit.campaign import SMALL
from torchtitan.metrics.ledger import LEDGER, hash_manifest, read_ledger
from torchtitan.tools.audit import command as audit
from torchtitan.tools.compare import compare_runs

pytestmark = pytest.mark.long

JOB = [
    *SMALL,
    "--activation_checkpoint.mode=none",
    "--training.mixed_precision_param=float32",
    "--lr_scheduler.total_steps=20",
    "--checkpoint.enable",
    "--checkpoint.interval=2",
    "--metrics.log_freq=1",
    "--checkpoint.async_mode=async",
]
SLOWER = ["--checkpoint.mode=continue", "--optimizer.lr=0.0005"]


@pytest.fixture
def run(tmp_path: Path, ranks: RankPool) -> Path:
    """Steps 1 to 4 on one device; 5 and 6 twice, the second time with another rate; a plain
    restart; and three in another layout, past some samples."""
    job = [*JOB, f"--job.dump_folder={tmp_path}/run"]
    ranks.run(jobs.train, [*job, "--training.steps=6"], world=1)
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-6")  # as if it was killed before
    ranks.run(jobs.train, [*job, *SLOWER, "--training.steps=6"], world=1)
    ranks.run(jobs.train, [*job, "--optimizer.lr=0.0005", "--training.steps=7"], world=1)
    later = [*job, *SLOWER, "--training.steps=10", "--training.skip_samples=60-70"]
    ranks.run(jobs.train, later, world=2)
    return tmp_path / "run"


def test_what_the_ledger_says(run: Path) -> None:
    rows = read_ledger(run)
    starts = [row for row in rows if row["event"] == "start"]
    assert [row["step"] for row in starts] == [0, 4, 6, 7]
    assert [row["world_size"] for row in starts] == [1, 1, 1, 2]
    assert starts[0]["loaded"] is None
    assert starts[1]["loaded"] == str(run / "checkpoint" / "step-4")
    changes = {
        (row["step"], row["setting"]): (row["old"], row["new"])
        for row in rows
        if row["event"] == "change"
    }
    assert changes[4, "optimizer.lr"] == (0.0008, 0.0005)
    assert changes[7, "training.skip_samples"] == ([], [[60, 70]])
    assert changes[7, "layout"] == ("one device", "dp_shard 2")
    assert (6, "optimizer.lr") not in changes
    saved = [row for row in rows if row["event"] == "checkpoint"]
    assert [row["step"] for row in saved] == [2, 4, 6, 6, 7, 8, 10]
    for row in saved[-2:]:
        assert row["manifest_sha256"] == hash_manifest(run / row["folder"])
    ends = [(row["step"], row["reason"]) for row in rows if row["event"] == "end"]
    assert ends == [(6, "finished"), (6, "finished"), (7, "finished"), (10, "finished")]


def test_the_commands_train_the_same_weights(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = read_ledger(run)
    for row in rows:
        if row["event"] == "start":
            changes = "8d" if row["step"] == 0 else ""
            row["git"] = {"torchtitan": {"commit": "5c" * 20, "diff_sha256": changes}}
    (run / LEDGER).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    again = tmp_path / "again"
    assert audit.main(["reproduce", str(run), "--out", str(again)]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"steps (\d+ to \d+): (.*?), 2", said) == [
        ("1 to 4", "one device"),
        ("5 to 7", "one device"),
        ("8 to 10", "dp_shard 2"),
    ]
    code = f"commit {'5c' * 20} with uncommitted changes, other code at a later start\n"
    assert f"#   code of torchtitan: {code}" in (again / "reproduce.sh").read_text()
    python = Path(sys.executable).parent
    subprocess.run(
        [str(again / "reproduce.sh")],
        check=True,
        capture_output=True,
        timeout=240,
        env={**os.environ, "PATH": f"{python}:{os.environ['PATH']}", "PYTHONPATH": os.getcwd()},
    )
    found = compare_runs.compare_runs(run, again / "run", folder="checkpoint", tolerance=0)
    # each command trains to another last step
    assert {one.partition(": ")[0].partition("/")[2] for one in found.differences} <= {
        "lr_scheduler, training_steps"
    }
    equal = [part for part, _, num_differing, _ in found.table if not num_differing]
    assert {f"step-{step}/optimizer" for step in (4, 6, 7, 8, 10)} < set(equal)
    assert "metrics.jsonl" in equal


def test_a_torn_row_is_cut_off_and_an_error_is_an_end(tmp_path: Path, ranks: RankPool) -> None:
    run = tmp_path / "run"
    job = [*JOB, f"--job.dump_folder={run}", "--training.steps=2"]
    ranks.run(jobs.train, job, world=1)
    ledger = run / LEDGER
    num_rows = len(read_ledger(run))
    with ledger.open("ab") as file:
        file.write(b'{"event": "end", "st')
    assert len(read_ledger(run)) == num_rows
    ranks.run(jobs.train, [*job, "--training.steps=4"], world=1)
    assert [row["event"] for row in read_ledger(run)[num_rows:]][:2] == ["start", "change"]


def test_a_run_that_fails_says_why(ranks: RankPool, tmp_path: Path) -> None:
    job = [*JOB, f"--job.dump_folder={tmp_path}", "--optimizer.lr=1e30", "--training.steps=9"]
    with pytest.raises(RankError, match="NonFiniteError"):
        ranks.run(jobs.train, job, world=1)
    last = read_ledger(tmp_path)[-1]
    assert last["event"] == "end"
    assert last["reason"].startswith("NonFiniteError: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing", "--out", "x"], "missing"),
        (["missing", "--out", "."], "--out"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main(["reproduce", *arguments]) == 2
    assert said in capsys.readouterr().err
