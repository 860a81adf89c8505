"""Profiled runs: traces where the settings say, of the right steps, and no number changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.metrics.settings import ProfilingConfig
from torchtitan.metrics.trace import Profiler

CPU = torch.device("cpu")
ON = [
    "--profiling.enable_profiling",
    "--profiling.profile_freq=2",
    "--profiling.profiler_warmup=1",
    "--profiling.profiler_active=1",
]


def trace_of(path: Path) -> list[str]:
    return [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]


def settings(**keys: int) -> ProfilingConfig:
    return ProfilingConfig(enable_profiling=True, save_traces_folder="traces", **keys)


def test_records_the_last_steps_of_each_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    keys = {"profile_freq": 4, "profiler_warmup": 1, "profiler_active": 2}
    profiler = Profiler(settings(**keys), folder=tmp_path, rank=3, device=CPU)
    for step in range(101, 112):  # a resumed run counts on from where it was
        with torch.profiler.record_function(f"training step {step}"):
            torch.ones(3).sum()
        profiler.step(step)
    profiler.close()
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*"))
    assert files == ["traces/step-104/rank_3.json", "traces/step-108/rank_3.json"]
    for last in (104, 108):
        names = trace_of(tmp_path / f"traces/step-{last}/rank_3.json")
        steps = {name for name in names if name.startswith("training step")}
        assert steps == {f"training step {last - 1}", f"training step {last}"}
        assert "aten::sum" in names
    assert not list(recwarn)  # nor does torch's recorder, in C++, talk on the console
    assert os.environ["KINETO_LOG_LEVEL"] == "6"


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_profiled_run_trains_the_same(tmp_path: Path, ranks: RankPool) -> None:
    short = ["--training.steps=4", "--checkpoint.enable=false"]
    results = [
        ranks.run(
            jobs.train,
            [*jobs.write_job(tmp_path, name=name, cache=tmp_path / "cache"), *short, *extra],
            world=2,
        )[0]
        for name, extra in (("plain", []), ("profiled", ON))
    ]
    plain, profiled = results
    assert plain.state_hash == profiled.state_hash
    assert [row["loss"] for row in plain.rows] == [row["loss"] for row in profiled.rows]
    assert not (tmp_path / "plain/profile_traces").exists()
    folder = tmp_path / "profiled/profile_traces"
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
    assert names == [f"step-{step}/rank_{rank}.json" for step in (2, 4) for rank in (0, 1)]
    for name in names:
        assert any("AdamW" in event for event in trace_of(folder / name))
