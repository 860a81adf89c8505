"""Timelines of runs: from traces with known times, and from torch's own pipelines on two ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.profiler import record_function

from tests.distributed.rank_pool import RankPool
from torchtitan.base.errors import ConfigError
from torchtitan.config.schema import ProfilingConfig
from torchtitan.metrics.trace import Profiler
from torchtitan.parallel.pipeline_ranges import record_actions
from torchtitan.parallel.schedules import SCHEDULES, compute_table, place_stages
from torchtitan.plan.__main__ import main
from torchtitan.plan.measured import read_run, read_trace
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
        early = [(f"PP:{span.action}", span.start, span.end) for span in row]
        waits = [("PP:0RECV_F0", 0.0, 5.0)]
        late = [(f"PP:{span.action}", span.start + 1e6, span.end + 1e6) for span in row]
        write_trace(tmp_path, rank=rank, ranges=early + waits + late, base=500.0 * rank)
    run = read_run(tmp_path, step=None)
    assert (run.step, run.pp, run.num_stages, run.num_microbatches) == (4, 2, 4, 4)
    assert run.waits_included
    assert run.timeline.makespan == pytest.approx(plan.makespan / 1000)
    assert run.timeline.total_bubble == pytest.approx(plan.total_bubble)
    for row, planned in zip(run.timeline.rows, plan.rows, strict=True):
        assert [span.action for span in row] == [span.action for span in planned]
        assert [span.start * 1000 for span in row] == pytest.approx([s.start for s in planned])
    measured = run.costs()
    assert (measured.forward, measured.backward_input) == (pytest.approx(1), pytest.approx(1.5))


def test_names_of_torch(tmp_path: Path) -> None:
    pair = [("PP:(0F1;3B0)OVERLAP_F_B", 0.0, 9.0), ("PP:3F2", 9.0, 10.0)]
    row, own = read_trace(write_trace(tmp_path, rank=0, ranges=pair), rank=0)
    assert not own
    spans = [(str(span.action), span.start, span.end) for span in row]
    assert spans == [("0F1", 0, 3), ("3B0", 3, 9), ("3F2", 9, 10)]
    single = [("Forward 0", 0.0, 2.0), ("Backward 0", 2.0, 5.0)]
    row, own = read_trace(write_trace(tmp_path, rank=1, ranges=single), rank=1)
    assert [str(span.action) for span in row] == ["1F0", "1B0"]
    # torch's range holds the wait too: ours lies within
    both = [("PP:0F0", 0.0, 9.0), ("pipeline:0F0", 6.0, 9.0), ("pipeline:0B0", 9.0, 12.0)]
    row, own = read_trace(write_trace(tmp_path, rank=1, ranges=both), rank=0)
    assert own
    assert [(str(span.action), span.start) for span in row] == [("0F0", 6), ("0B0", 9)]


class Slow(nn.Module):
    """A layer whose time is known well enough to see waits beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return self.linear(x)


def run_pipeline(run: Path, name: str) -> None:
    """Train three profiled steps by torch's runtime on this rank."""
    rank, pp = dist.get_rank(), dist.get_world_size()
    placement = place_stages(name, pp=pp, stages_per_rank=2 if SCHEDULES[name].multi_stage else 1)
    # torch's stages send gradients only for what is said to need them
    shape = torch.empty(2, 4, device="meta", requires_grad=True)
    stages = [
        PipelineStage(
            Slow(), stage, len(placement), torch.device("cpu"), input_args=shape, output_args=shape
        )
        for stage, where in enumerate(placement)
        if where == rank
    ]
    for stage in stages:
        record_actions(stage)
    multi = SCHEDULES[name].multi_stage
    schedule = get_schedule_class(name)(
        stages if multi else stages[0], 4, loss_fn=lambda output, target: (output - target).sum()
    )
    settings = ProfilingConfig(
        enable_profiling=True, profile_freq=3, profiler_active=1, profiler_warmup=1
    )
    profiler = Profiler(settings, folder=run, rank=rank, device=torch.device("cpu"))
    batch = (torch.ones(8, 4),) if any(stage.is_first for stage in stages) else ()
    target = torch.ones(8, 4) if any(stage.is_last for stage in stages) else None
    for step in (1, 2, 3):
        schedule.step(*batch, target=target)
        profiler.step(step)
    profiler.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_torchs_pipelines_do_what_their_tables_say(
    name: str, tmp_path: Path, ranks: RankPool, capsys: pytest.CaptureFixture[str]
) -> None:
    write_settings(tmp_path, schedule=name)
    ranks.run(run_pipeline, tmp_path, name, world=2)
    run = read_run(tmp_path, step=3)
    assert not run.waits_included
    per_rank = 2 if SCHEDULES[name].multi_stage else 1
    table = compute_table(name, pp=2, stages_per_rank=per_rank, num_microbatches=4)
    for row, planned in zip(run.timeline.rows, table, strict=True):
        assert [str(span.action) for span in row] == [str(action) for action in planned]
        forwards = [s.end - s.start for s in row if s.action.kind == "forward"]
        assert min(forwards) >= 10  # milliseconds, slept
    # rank 1 cannot start before rank 0's first forward is done
    assert run.timeline.rows[1][0].start >= run.timeline.rows[0][0].end
    picture = tmp_path / "both.svg"
    assert main(["schedule", "--measured", str(tmp_path), "--out", str(picture)]) == 0
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
    write_trace(tmp_path, rank=0, ranges=[("PP:0F0", 0.0, 1.0), ("PP:0B0", 1.0, 2.0)])
    refused("step 9 was not profiled, only 4", step=9)
    refused("holds 1 traces, a multiple of 2 ranks is due")
    path = write_trace(tmp_path, rank=1, ranges=[("AdamW", 0.0, 1.0)])
    refused(r"rank_1\.json: holds no action of a pipeline")
    path.write_text("{")
    refused(r"rank_1\.json: cannot be read as a trace")


def test_an_incomplete_step_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_settings(tmp_path, schedule="GPipe")
    for rank in (0, 1):
        ranges = [(f"{kind} 0", start, start + 1.0) for kind, start in (("Forward", 0.0),)]
        ranges += [("Backward 0", 2.0, 3.0), ("Backward 1", 3.0, 4.0)]
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
