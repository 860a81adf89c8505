"""The rank that the others waited for is named, from what the ranks of a real run have recorded."""

from __future__ import annotations

import os
import pickle
import socket
from pathlib import Path

import pytest

from tests.distributed.jobs import write_job
from torchtitan.base.errors import DataError
from torchtitan.tools.compare.launch import run_ranks
from torchtitan.tools.hang import Call, describe, find_waits, main, read_calls

ROOT = Path(__file__).parents[2]
Group = tuple[str, str, tuple[int, ...]]
WORLD: Group = ("gloo", "default_pg", (0, 1, 2, 3))
LEFT, RIGHT = (("gloo", "mesh_tp", ranks) for ranks in ((0, 1), (2, 3)))

STUCK = """
import os, time

class Stuck:
    def on_step(self, step, row):
        if step == 2 and os.environ["RANK"] == "1":
            time.sleep(8)
"""


@pytest.mark.promise("tools")
@pytest.mark.long
def test_a_rank_that_hangs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    job = [*write_job(tmp_path), "--comm.train_timeout_seconds=3", "--training.steps=4"]
    job += ["--checkpoint.enable=false", '--training.callbacks=["stuck:Stuck"]']
    paths = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    problem = run_ranks(job, world_size=2, log=tmp_path / "log", environ=paths)
    assert "exit code 4" in problem
    assert main([str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "rank 0 waits for rank 1 in all_reduce" in said
    assert "rank 1 waits" not in said
    (tmp_path / "run" / "comm_traces" / "gloo_1").unlink()
    assert main([str(tmp_path / "run")]) == 0
    assert f"It started with rank 1 (on {socket.gethostname()}, " in capsys.readouterr().out


def test_a_run_without_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"--job.dump_folder={tmp_path}"
    for words in ([str(tmp_path)], [folder], ["debug_model", folder, "--training.steps=3"]):
        assert main(words) == 2
        assert str(tmp_path / "config.toml") in capsys.readouterr().err


def call(group: Group, number: int, *, at: float = 100.0) -> Call:
    return Call(group=group, number=number, at=at, text=f"all_reduce {number}")


@pytest.mark.promise("tools")
def test_a_chain_leads_to_where_it_began(tmp_path: Path) -> None:
    """0 and 1 wait for 2 and 3, of which 2 waits for 3, which has done no less than all."""
    calls = {
        0: [call(LEFT, 5), call(WORLD, 3)],
        1: [call(LEFT, 5), call(WORLD, 3)],
        2: [call(WORLD, 2), call(RIGHT, 5)],
        3: [call(WORLD, 2), call(RIGHT, 4)],
    }
    waits = {rank: awaited for rank, (_, awaited) in find_waits(calls, late=50).items()}
    assert waits == {0: [2, 3], 1: [2, 3], 2: [3]}
    log = [f"INFO x: rank 3 on {host}, process 7\n" for host in ("node8", "node9")]
    (tmp_path / "rank_3.log").write_text("".join(log))
    text = "\n".join(describe(calls, late=50, logs=tmp_path))
    assert "It started with rank 3 (on node9, process 7)" in text  # its newest start
    # it comes at last, when the others have given up
    calls[3] = [call(WORLD, 2), call(RIGHT, 5, at=151.0)]
    assert {*find_waits(calls, late=50)} == {0, 1, 2}
    assert 2 not in find_waits(calls, late=52)


def nccl(
    number: int, *, operator: str = "all_reduce", group: str = "fsdp", state: str = "scheduled"
) -> dict[str, object]:
    """Return a call as NCCL records it; its time in seconds is its number."""
    return {
        "is_p2p": False,
        "process_group": (group, ""),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{operator}",
        "input_sizes": ((8, 4),),
        "time_created_ns": number * 10**9,
        "state": state,
        "frames": [{"name": "f", "filename": "/a/torchtitan/optim/clip.py", "line": 3}],
    }


def write_record(file: Path, entries: object, **groups: str) -> None:
    config = {k: {"name": k, "desc": f"mesh_{k}", "ranks": ranks} for k, ranks in groups.items()}
    file.write_bytes(pickle.dumps({"pg_config": config, "entries": entries}))


@pytest.mark.promise("no-code-from-checkpoints")
def test_nccl_s_own_file_is_read_and_runs_nothing(tmp_path: Path) -> None:
    """NCCL writes pickles, which could call anything."""
    file, ranks = tmp_path / "rank_0", {"fsdp": "[0, 1]"}
    write_record(file, [nccl(7, operator="_reduce_scatter_base")], **ranks)
    [read] = read_calls(tmp_path, prefix="rank_")[0]
    assert (read.group, read.number, read.at) == (("nccl", "mesh_fsdp", (0, 1)), 7, 7.0)
    assert all(part in read.text for part in ("reduce_scatter_base", "8x4", "optim/clip.py:3"))
    # NCCL's own record is the newest
    write_record(tmp_path / "nccl_0", [nccl(6)], **ranks)
    assert [call.number for call in read_calls(tmp_path, prefix="rank_")[0]] == [7]
    (tmp_path / "rank_0").rename(tmp_path / "rank_1")
    assert [call.number for call in read_calls(tmp_path, prefix="rank_")[0]] == [6]
    write_record(file, os.getcwd, **ranks)
    with pytest.raises(DataError, match="getcwd"):
        read_calls(tmp_path, prefix="rank_")


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    """Of groups, times and entries, and a pipe."""
    file, own = tmp_path / "gloo_0", "[0, 1]"
    bad: list[object] = [nccl(10**40), nccl(7) | {"process_group": []}, nccl(7), None]
    for entry, ranks in zip(bad, (own, own, "[[0]]", own), strict=True):
        write_record(file, [entry], fsdp=ranks)
        if entry is None:
            file.unlink()
            os.mkfifo(file)
        with pytest.raises(DataError, match="gloo_0"):
            read_calls(tmp_path, prefix="rank_")


def test_records_of_nccl_and_gloo_are_read_together(tmp_path: Path) -> None:
    """The ranks of tp have enqueued calls far ahead; rank 2 has not called what rank 0 waits in.

    NCCL and gloo both count from 1 in groups of the same name.
    """
    groups = {"fsdp": "[0, 2]", "tp": "[0, 1]"}
    done = nccl(1, state="completed")
    ahead = [nccl(number, group="tp") for number in (1, 2, 3)]
    stuck = nccl(2, operator="_allgather_base")
    write_record(tmp_path / "rank_0", [done, stuck, *ahead], **groups)
    write_record(tmp_path / "rank_1", ahead, **groups)
    late = done | {"time_created_ns": 100 * 10**9}  # a slow rank, which has come
    write_record(tmp_path / "rank_2", [late], **groups)
    for rank in (0, 1, 2):  # all have voted, and then called NCCL
        vote = nccl(1, operator="barrier") | {"profiling_name": "gloo:barrier"}
        write_record(tmp_path / f"gloo_{rank}", [vote], fsdp="[0, 1, 2]")
    calls = read_calls(tmp_path, prefix="rank_")
    waits = find_waits(calls, late=50)
    assert {rank: awaited for rank, (_, awaited) in waits.items()} == {0: [2]}
    assert "It started with rank 2" in "\n".join(describe(calls, late=50, logs=tmp_path))
