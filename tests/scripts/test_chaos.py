"""A few faults of chaos.py, and the errors for runs that lost a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.chaos import ElasticRun, KilledRun, LossError, kill_again_and_again, lose_node
from scripts.s3_server import BUCKET, S3Server, s3_server
from torchtitan.checkpoint.checksums import seal, write_bytes


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.promise("kill-save")
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("layout", "mode", "kills"), [("single", "disabled", 1), ("pp2", "async", 2)]
)
@pytest.mark.long
def test_no_checkpoint_is_lost(layout: str, mode: str, kills: int, tmp_path: Path) -> None:
    options = (f"--checkpoint.async_mode={mode}",)
    run = KilledRun(folder=tmp_path, layout=layout, options=options)
    assert kill_again_and_again(run, kills=kills, rng=random.Random(1)).endswith("equal")


@pytest.fixture
def server() -> Iterator[S3Server]:
    for package in ("boto3", "moto", "flask", "flask_cors"):
        pytest.importorskip(package)
    with s3_server() as server:
        server.empty_bucket()
        yield server


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.promise("kill-upload")
@pytest.mark.timeout(280)
@pytest.mark.long
def test_no_upload_is_lost(server: S3Server, tmp_path: Path) -> None:
    options = ("--checkpoint.async_mode=async",)
    run = KilledRun(folder=tmp_path, layout="fsdp2", options=options, server=server)
    faults = kill_again_and_again(run, kills=3, rng=random.Random(3))
    assert "and the disk" in faults
    assert "in a save" in faults


@pytest.mark.promise("resume-elsewhere")
@pytest.mark.long
def test_two_nodes_one_two(tmp_path: Path) -> None:
    """The first node is killed: rank 0 with its log and its figures."""
    run = ElasticRun(folder=tmp_path, nodes=2, steps=45)
    assert "ranks [2, 1, 2]" in lose_node(run, victim=0)


@pytest.fixture
def run(tmp_path: Path) -> KilledRun:
    return KilledRun(folder=tmp_path)


def write_start(run: KilledRun, log: str, *steps: int) -> None:
    """Write the output and the undamaged checkpoints of a start."""
    (run.folder / "output_0.txt").write_text(log)
    for step in steps:
        folder = run.results / "checkpoint" / f"step-{step}"
        folder.mkdir(parents=True)
        write_bytes(folder / "manifest.json", seal({"files": {}}))


@pytest.mark.promise("kill-save")
def test_a_lost_checkpoint_is_found(run: KilledRun) -> None:
    write_start(run, "Saved x/step-2\nSaved x/step-4\n", 2)
    with pytest.raises(LossError, match=r"4.*\[2\]"):
        run.check()


@pytest.mark.promise("kill-save")
@pytest.mark.parametrize("log", ["Resumed from x/step-2\n", ""])
def test_an_older_resume_is_found(log: str, run: KilledRun) -> None:
    write_start(run, "Saved x/step-2\nSaved x/step-4\n", 2, 4)
    run.check()
    write_start(run, log, 6)
    with pytest.raises(LossError, match="step 4 "):
        run.check()


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.long
def test_a_lost_or_damaged_upload_is_found(server: S3Server, tmp_path: Path) -> None:
    options = ("--checkpoint.interval=2", "--checkpoint.keep_latest_k=3")
    run = KilledRun(folder=tmp_path, options=options, server=server)
    run.finish(steps=4)
    assert run.uploaded == run.saved == {2, 4}
    run.saved, run.uploaded = set(), set()  # no start follows
    client = server.client()
    files = client.list_objects_v2(Bucket=BUCKET, Prefix="run/step-2/")["Contents"]
    key = next(file["Key"] for file in files if file["Key"].endswith(".distcp"))
    content = client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    client.put_object(Bucket=BUCKET, Key=key, Body=b"x" + content[1:])
    with pytest.raises(LossError, match="step 2 "):
        run.check()
    run.saved, run.uploaded = set(), set()
    client.delete_object(Bucket=BUCKET, Key="run/step-2/manifest.json")
    with pytest.raises(LossError, match=r"step 2 .*\[4\]"):
        run.check()
