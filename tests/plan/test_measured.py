"""Timelines of runs: from traces with known times, and from pipelines on two ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from tests.distributed import jobs
from tests.distributed.pipeline_jobs import FOUR_LAYERS, TINY8, pipeline
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_parts import resized
from torchtitan.base.errors import ConfigError
from torchtitan.parallel.pipeline.ranges import record_actions
from torchtitan.parallel.pipeline.schedules import SCHEDULES, compute_table
from torchtitan.plan.__main__ import main
from torchtitan.plan.measured import read_run
from torchtitan.plan.schedule import Costs, simulate


def write_settings(run: Path, *, schedule: str, pp: int = 2) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.toml").write_text(
        f'[parallelism]\npipeline_parallel_degree = {pp}\npipeline_parallel_schedule = "{schedule}"'
    )


def write_trace(
    run: Path, *, rank: int, ranges: Sequence[tuple[str, float, float]], base: float = 0.0
) -> Path:
    """Write a trace as torch does: microseconds from a base of its own."""
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": start - base, "dur": end - start}
        for name, start, end in ranges
    ]
    events += [{"ph": "X", "cat": "cpu_op", "name": "PP:0F0", "ts": 0.0, "dur": 9.0}]
    folder = run / "profile_traces/step-4"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{rank}.json"
    path.write_text(json.dumps({"baseTimeNanoseconds": base * 1000, "traceEvents": events}))
    return path


def test_what_was_simulated_is_read_back(tmp_path: Path) -> None:
    costs = Costs(forward=1000, backward=3000, backward_input=1500, backward_weight=1500)
    table = compute_table("ZBVZeroBubble", pp=2, stages_per_rank=2, num_microbatches=4)
    plan = simulate(table, costs=costs)
    write_settings(tmp_path, schedule="ZBVZeroBubble")
    for rank, row in enumerate(plan.rows):
        early = [(f"pipeline:{span.action}", span.start, span.end) for span in row]
        waits = [("PP:0RECV_F0", 0.0, 5.0), ("PP:0F0", 0.0, 9.0)]
        late = [(f"pipeline:{span.action}", span.start + 1e6, span.end + 1e6) for span in row]
        write_trace(tmp_path, rank=rank, ranges=early + waits + late, base=500.0 * rank)
    run = read_run(tmp_path, step=None)
    assert (run.step, run.pp, run.num_stages, run.num_microbatches) == (4, 2, 4, 4)
    assert run.timeline.makespan == pytest.approx(plan.makespan / 1000)
    assert run.timeline.total_bubble == pytest.approx(plan.total_bubble)
    for row, planned in zip(run.timeline.rows, plan.rows, strict=True):
        assert [span.action for span in row] == [span.action for span in planned]
        assert [span.start * 1000 for span in row] == pytest.approx([s.start for s in planned])
    measured = run.costs()
    assert (measured.forward, measured.backward_input) == (pytest.approx(1), pytest.approx(1.5))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_a_run_does_what_its_table_says(
    name: str, tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    profiled = ("enable_profiling=true", "profile_freq=3", "profiler_warmup=1")
    job = [
        *jobs.write_job(tmp_path, TINY8),
        *pipeline(name),
        *(f"--profiling.{setting}" for setting in profiled),
    ]
    ranks.run(resized, jobs.train, FOUR_LAYERS, job, "tiny8", world=2)
    folder = tmp_path / "run"
    run = read_run(folder, step=3)
    per_rank = 2 if SCHEDULES[name].multi_stage else 1
    table = compute_table(name, pp=2, stages_per_rank=per_rank, num_microbatches=4)
    for row, planned in zip(run.timeline.rows, table, strict=True):
        assert [str(span.action) for span in row] == [str(action) for action in planned]
    # rank 1 cannot start before rank 0's first forward is done
    assert run.timeline.rows[1][0].start >= run.timeline.rows[0][0].end
    picture = tmp_path / "both.svg"
    assert main(["schedule", "--measured", str(folder), "--out", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert f"{name}, planned at the durations measured: bubble" in printed
    assert f"{name}, measured in step 3: bubble" in printed
    assert picture.read_text().count("rank 1") == 2


def test_refusals(tmp_path: Path) -> None:
    def refused(message: str, *, step: int | None = None) -> None:
        with pytest.raises(ConfigError, match=message):
            read_run(tmp_path, step=step)

    refused("no run's folder")
    write_settings(tmp_path, schedule="1F1B")
    refused("holds no trace; train with --profiling.enable_profiling")
    write_trace(tmp_path, rank=0, ranges=[("pipeline:0F0", 0.0, 1.0), ("pipeline:0B0", 1.0, 2.0)])
    refused("step 9 was not profiled, only 4", step=9)
    refused("holds 1 traces, a multiple of 2 ranks is due")
    path = write_trace(tmp_path, rank=1, ranges=[("AdamW", 0.0, 1.0)])
    refused(r"rank_1\.json: holds no action of a pipeline")
    path.write_text("{")
    refused(r"rank_1\.json: cannot be read as a trace")


def test_an_incomplete_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_settings(tmp_path, schedule="GPipe")
    for rank in (0, 1):
        names = (f"pipeline:{rank}F0", f"pipeline:{rank}B0", f"pipeline:{rank}B1")
        ranges = [(name, start, start + 1.0) for start, name in enumerate(names)]
        write_trace(tmp_path, rank=rank, ranges=ranges)
    assert main(["schedule", "--measured", str(tmp_path)]) == 2
    assert "rank 0 misses 1 actions of GPipe, 0F1 for one" in capsys.readouterr().err
    assert main(["schedule", "--measured", str(tmp_path), "--pp", "2", "--forward", "2"]) == 2
    assert "takes all from the run; leave out --pp, --forward" in capsys.readouterr().err


def test_ranges_leave_what_they_wrap_as_it_is() -> None:
    class Stage:
        stage_index = 5

        def forward_one_chunk(self, chunk: int, args: str, save_forward_output: bool) -> str:
            return f"{chunk} {args} {save_forward_output}"

        def backward_one_chunk(self, chunk: int, full_backward: bool = True) -> bool:
            return full_backward

        def backward_weight_one_chunk(self, chunk: int) -> None:
            raise ValueError("as it was")

    stage = Stage()
    record_actions(stage)
    with torch.profiler.profile() as profiled, record_function("outside"):
        assert stage.forward_one_chunk(1, "x", save_forward_output=False) == "1 x False"
        assert stage.backward_one_chunk(2)
        assert not stage.backward_one_chunk(3, full_backward=False)
        with pytest.raises(ValueError, match="as it was"):
            stage.backward_weight_one_chunk(4)
    names = {event.name for event in profiled.events()} - {"outside"}
    assert {"pipeline:5F1", "pipeline:5B2", "pipeline:5I3", "pipeline:5W4"} <= names
