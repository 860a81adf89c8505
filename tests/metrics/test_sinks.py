from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.naming import naming
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.metrics.rows import Row, read_rows
from torchtitan.metrics.settings import MetricsConfig
from torchtitan.metrics.sinks import JsonlSink, build_sinks
from torchtitan.metrics.trackers import TensorBoardSink


def _row(step: int, **figures: float) -> Row:
    return {
        "step": step,
        "loss": 10 / 3 / step,
        "max_loss": 5.5,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "num_tokens": 1024 * step,
        "valid_token_fraction": 1.0,
        "tokens_per_second": 40000.0,
        "tokens_per_second_per_device": 10000.0,
        "tflops_per_device": 0.5,
        "mfu": 12.5,
        "step_time_s": 0.2,
        "data_time_s": 0.05,
        "memory_peak_gib": 1.5,
        **figures,
    }


def _write(path: Path, steps: list[int], *, resume_step: int, **figures: float) -> None:
    sink = JsonlSink(path, resume_step=resume_step)
    for step in steps:
        sink.write(_row(step, **figures))
    sink.close()


@pytest.mark.promise("last-stage-loss")
def test_jsonl_keeps_every_digit(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    numbers = {"loss": 0.1 + 0.2, "grad_norm": 2**-1074, "lr": 1 / 3, "num_tokens": 2**60 + 1}
    _write(path, [1], resume_step=0, **numbers)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [_row(1, **numbers)]
    assert list(read_rows(path)) == [_row(1, **numbers)]


@pytest.mark.parametrize(("resume_step", "kept"), [(4, [1, 2, 4]), (5, [1, 2, 4])])
def test_jsonl_drops_what_is_trained_again(
    tmp_path: Path, resume_step: int, kept: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2, 4, 6, 8], resume_step=0, loss=1.0)
    _write(path, [6, 8], resume_step=resume_step, loss=2.0)
    rows = list(read_rows(path))
    assert [row["step"] for row in rows] == [*kept, 6, 8]
    assert [row["loss"] for row in rows] == [1.0] * len(kept) + [2.0, 2.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rows_of_another_training_are_kept_aside(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for loss in (1.0, 2.0, 3.0):
        _write(path, [1, 2], resume_step=0, loss=loss)
    for name, loss in (("metrics.1.jsonl", 1.0), ("metrics.2.jsonl", 2.0), (path.name, 3.0)):
        assert [row["loss"] for row in read_rows(tmp_path / name)] == [loss, loss]


@pytest.mark.promise("surface")
def test_jsonl_survives_every_place_of_a_torn_last_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    _write(path, [1, 2], resume_step=0)
    first, second = path.read_bytes().splitlines(keepends=True)
    for length in {*range(0, len(second), 7), len(second) - 2, len(second) - 1}:
        path.write_bytes(first + second[:length])
        whole = length == len(second) - 1  # nothing but the newline is missing
        _write(path, [3], resume_step=2)
        assert [row["step"] for row in read_rows(path)] == ([1, 2, 3] if whole else [1, 3])


@pytest.mark.parametrize(
    "line", ["no json", "[" * 100_000, "9" * 5000, "[1]", '{"loss": 1}', '{"step": "1"}']
)
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    text = json.dumps(_row(1)) + f"\n{line}\n" + json.dumps(_row(2)) + "\n"
    path.write_text(text)
    with pytest.raises(DataError, match=naming(f"{path} line 2")):
        JsonlSink(path, resume_step=1)
    assert path.read_text() == text


NO_FIGURE = {"loss": None, "max_loss": None, "mfu": None}
VALIDATION = {
    "validation_loss": 2.5,
    "validation_perplexity": 12.18249,
    "validation_time_s": 0.5,
}


def _events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = _events(folder)
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


@pytest.mark.promise("last-stage-loss", "surface")
def test_tensorboard_has_torchtitans_tags_and_hides_what_is_trained_again(tmp_path: Path) -> None:
    for resume_step, steps, loss in ((0, (1, 2, 3), 1.0), (2, (3, 4), 2.0)):
        settings = {"training": {"steps": 3, "loader": {"names": ("*", None)}}}
        sink = TensorBoardSink(tmp_path / "tb", resume_step=resume_step, settings=settings)
        for step in steps:
            sink.write(_row(step, loss=loss) | (VALIDATION if step == 4 else {}))
        if step == 4:
            sink.write(_row(5) | NO_FIGURE)
        sink.close()
    texts = _events(tmp_path / "tb").Tensors("settings/text_summary")
    assert [event.step for event in texts] == [0, 2]
    assert json.loads(texts[0].tensor_proto.string_val[0].decode()) == {
        "training": {"steps": 3, "loader": {"names": ["*", None]}}
    }
    scalars = _scalars(tmp_path / "tb")
    assert scalars["loss_metrics/global_avg_loss"] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    expected = {
        "loss_metrics/global_max_loss": 5.5,
        "grad_norm": 1.25,
        "lr": 3e-4,
        "throughput(tps)": 10000.0,
        "tokens_per_second": 40000.0,
        "tflops": 0.5,
        "mfu(%)": 12.5,
        "time_metrics/end_to_end(s)": 0.2,
        "time_metrics/data_loading(s)": 0.05,
        "time_metrics/data_loading(%)": 25.0,
        "memory/max_active(GiB)": 1.5,
        "n_tokens_seen": 4096.0,
        "valid_token_fraction": 1.0,
        "validation_metrics/global_avg_loss": 2.5,
        "validation_metrics/perplexity": 12.18249,
        "validation_metrics/time(s)": 0.5,
    }
    assert set(scalars) == {*expected, "loss_metrics/global_avg_loss"}
    for tag, value in expected.items():
        assert dict(scalars[tag])[4] == pytest.approx(value), tag
    assert scalars["grad_norm"][-1][0] == 5
    for tag in ("loss_metrics/global_avg_loss", "loss_metrics/global_max_loss", "mfu(%)"):
        assert scalars[tag][-1][0] == 4  # a step without a figure has no point, not even 0


def _python(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**kept, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


WANDB_RUN = """
import sys
from pathlib import Path
from torchtitan.base.errors import ConfigError
from torchtitan.metrics.trackers import WandbSink
try:
    sink = WandbSink(Path(sys.argv[1]), name="my run", settings={"model": {"flavor": "odd-flavor"}})
except ConfigError as error:
    sys.exit(f"ConfigError: {error}")
sink.write({"step": 3, "loss": 1.0625, "grad_norm": 0.0078125})
sink.close()
"""


@pytest.mark.slow
def test_wandb_works_offline(tmp_path: Path) -> None:
    done = _python(WANDB_RUN, str(tmp_path / "run"), WANDB_MODE="offline", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    written = record.read_bytes()
    for part in ("my run", "odd-flavor", "loss_metrics/global_avg_loss", "1.0625", "0.0078125"):
        assert part.encode() in written, part


def _build(folder: Path, metrics: MetricsConfig, *, rank: int = 0) -> list[str]:
    sinks = build_sinks(
        metrics,
        folder=folder,
        rank=rank,
        resume_step=0,
        last_step=3,
        color=False,
        job_config={"training": {"steps": 3}},
        description="a test",
    )
    for sink in sinks:
        sink.write(_row(1))
        sink.close()
    return [type(sink).__name__ for sink in sinks]


def test_all_ranks_can_write_files_of_their_own(tmp_path: Path) -> None:
    metrics = MetricsConfig(enable_tensorboard=True, save_for_all_ranks=True)
    for rank in (0, 2):
        _build(tmp_path, metrics, rank=rank)
        assert "lr" in _scalars(tmp_path / "tb" / tmp_path.name / f"rank_{rank}")
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == ["metrics.jsonl", "metrics.rank_2.jsonl", "tb"]


class Broken:
    """A sink that fails where `at` says."""

    def __init__(self, at: str, **_: object) -> None:
        self.at = at

    def write(self, row: Row) -> None:
        assert self.at != "write"

    def close(self) -> None:
        assert self.at != "close"


@pytest.mark.parametrize("at", ["write", "close"])
def test_an_error_of_a_custom_sink_is_a_mistake(at: str, tmp_path: Path) -> None:
    path = f"{__name__}:Broken"
    with pytest.raises(ConfigError, match=naming("sinks", path)):
        _build(tmp_path, MetricsConfig(sinks=({"path": path, "at": at},)))
