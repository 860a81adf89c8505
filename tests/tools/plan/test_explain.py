"""Runs beside their plans: one trained here, others with figures made up and worked out by hand."""

from __future__ import annotations

import json
import re
import tracemalloc
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.tools.plan.jobs import TINY
from torchtitan.base.errors import ConfigError
from torchtitan.metrics.events import EventLog, Hardware
from torchtitan.metrics.rows import read_rows
from torchtitan.resume_rules import Job
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.devices import DEVICES
from torchtitan.tools.plan.explain import device_of, read_columns, settled
from torchtitan.tools.plan.job import place
from torchtitan.tools.plan.records import rehearse_rank
from torchtitan.train import main as train

pytestmark = pytest.mark.slow

H100 = "NVIDIA H100 80GB HBM3"


def explained(capsys: pytest.CaptureFixture[str], run: Path, *more: str) -> str:
    capsys.readouterr()
    assert main(["explain", str(run), *more]) == 0
    return capsys.readouterr().out


def write_start(run: Path, *, world_size: int, device: str = H100) -> None:
    hardware = Hardware(resumed_from=0, world_size=world_size, ranks_per_machine=1, device=device)
    EventLog(run).write("start", step=0, **asdict(hardware))


def made_up(run: Path, *, memory: float = 1.0, step: float = 1.0, device: str = H100) -> Path:
    run.mkdir(exist_ok=True)
    (run / "config.toml").write_text(TINY)
    write_start(run, world_size=1, device=device)
    rows = [
        {
            "step": number,
            "step_time_s": 99.0 if number == 1 else step * factor,
            "data_time_s": step / 2,
            "tokens_per_second": 512 / step,
            "mfu": 1.0,
            "memory_peak_gib": memory,
        }
        for number, factor in ((1, 1), (2, 0.5), (3, 1), (4, 2))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def test_a_gpu_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the predicted peak is +100 %; the first row does not count; half of a step of one
    second, of which the bounds are some microseconds, is waiting for data."""
    job = place(
        Job.stored_in(made_up(tmp_path) / "config.toml").config,
        world_size=1,
        device=DEVICES["H100"],
        gpus_per_node=1,
    )
    predicted = replay(rehearse_rank(job, 0)).active / 2**30
    text = explained(capsys, made_up(tmp_path, memory=2 * predicted))
    change = re.search(r"rank 0, peak +([\d.]+) +([\d.]+) .*measured is ([+-][\d.]+) % off", text)
    assert change
    assert float(change[1]) == pytest.approx(2 * predicted, abs=1e-5)
    assert float(change[2]) == pytest.approx(predicted, abs=1e-5)
    assert float(change[3]) == pytest.approx(100, abs=0.1)
    step = re.search(r"^step, s +(\S+) +(\S+) +(\S+)", text, flags=re.MULTILINE)
    assert step
    assert step.groups() == ("1", "0.5", "2")
    assert "slower than the worst bound by" in text
    assert "0.5 s of a step, 5" in text
    assert "Not compared" not in text


def test_devices() -> None:
    found = device_of(H100, asked=None)
    assert found is not None
    assert found.name == "H100"
    assert device_of("Some CPU, threads: 1 (OMP_NUM_THREADS)", asked=None) is None
    for other in ("NVIDIA H100 PCIe", "NVIDIA Unheard 9"):
        with pytest.raises(ConfigError, match=other):
            device_of(other, asked=None)


def test_a_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, run = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(TINY)
    arguments = [f"--job.config_file={job}", f"--job.dump_folder={run}", "--metrics.log_freq=1"]
    with ExitStack() as cleanup:
        assert train([*arguments, "--training.steps=3"], cleanup=cleanup) == 0
    text = explained(capsys, run)
    assert "Not compared: step time" in text
    assert "% off" not in text
    assert "bound" not in text
    assert "H100" not in text
    assert "H100" in explained(capsys, run, "--device", "H100")


@pytest.mark.usefixtures("in_process")
def test_ranks_of_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks 2 and 3 hold the second stage, whose head and logits the first has not."""
    run = made_up(tmp_path)
    staged = TINY + "[parallelism]\npipeline_parallel_degree = 2\n"
    (run / "config.toml").write_text(staged)
    write_start(run, world_size=4)
    rows = (run / "metrics.jsonl").read_text()
    for rank in (2, 3):
        (run / f"metrics.rank_{rank}.jsonl").write_text(rows)
    text = explained(capsys, run)
    predicted = dict(re.findall(r"^rank (\d), peak +[\d.]+ +([\d.]+)", text, flags=re.MULTILINE))
    assert list(predicted) == ["0", "2", "3"]
    assert predicted["2"] == predicted["3"] != predicted["0"]
    assert text.count("logits") == 1
    assert text.index("pipeline rank 1") < text.index("logits")


def test_a_resumed_run_counts_its_newest_start_alone(tmp_path: Path) -> None:
    start = Hardware(resumed_from=2, world_size=1, ranks_per_machine=1, device=H100)
    rows = list(read_rows(made_up(tmp_path) / "metrics.jsonl"))
    assert [row["step"] for row in settled(rows, start=start)] == [4]


def test_rows_are_read_one_by_one(tmp_path: Path) -> None:
    """A column is 8 bytes per row: of 4,000 rows far less than one megabyte."""
    run = made_up(tmp_path)
    lines = (run / "metrics.jsonl").read_text().splitlines()[-1]
    row = json.loads(lines) | {"mfu": None}
    text = "".join(json.dumps(row | {"step": step}) + "\n" for step in range(1, 4001))
    (run / "metrics.jsonl").write_text(text)
    start = Hardware(resumed_from=0, world_size=1, ranks_per_machine=1, device=H100)
    tracemalloc.start()
    try:
        columns = read_columns(settled(read_rows(run / "metrics.jsonl"), start=start))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1e6
    assert [*columns["step"]] == [*range(2, 4001)]
    assert {*columns["step_time_s"]} == {2.0}
    assert not columns["mfu"]


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(tmp_path)]) == 2
    assert "config.toml" in capsys.readouterr().err
    run = made_up(tmp_path)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text(lines[0] + "\n")
    assert main(["explain", str(run)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(3)))
    assert main(["explain", str(run)]) == 2
    assert "memory_peak_gib" in capsys.readouterr().err
    (run / "events.jsonl").unlink()
    assert main(["explain", str(run)]) != 0
    assert "events.jsonl" in capsys.readouterr().err
