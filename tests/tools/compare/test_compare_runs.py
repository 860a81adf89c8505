"""Two runs compared: equal ones are, and each planted difference is named."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.checkpoint.checksums import seal
from torchtitan.tools.compare import command
from torchtitan.tools.compare.gaps import tensor_difference
from torchtitan.tools.compare.runs import compare_runs


def compare(a: Path, b: Path, *options: str) -> int:
    return command.main(["runs", str(a), str(b), *options])


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same job on two ranks, twice, and on one."""
    folder = tmp_path_factory.mktemp("runs")
    for name, world in {"a": 2, "b": 2, "alone": 1}.items():
        job = jobs.write_job(folder, name=name, cache=folder / "cache")
        ranks.run(jobs.train, [*job, "--training.steps=2", "--checkpoint.interval=1"], world=world)
    return {name: folder / name for name in ("a", "b", "alone")}


@pytest.mark.promise("same-bits", "compare")
def test_equal_runs(runs: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(runs["a"], runs["b"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.startswith("step-")] == [
        f"step-{step}/{part}" for step in (1, 2) for part in ("model", "optimizer", "train_state")
    ]
    for options, code in ([], 1), (["--tolerance=1e-4"], 0), (["--tolerance=1e-12"], 1):
        assert compare(runs["a"], runs["alone"], *options) == code
    for wrong in ("nan", "inf", "-1"):
        assert compare(runs["a"], runs["b"], f"--tolerance={wrong}") == 2
    capsys.readouterr()
    assert compare(runs["a"], runs["b"], "--folder=none") == 0
    assert "figures equal" in capsys.readouterr().out


@pytest.fixture
def spoiled(runs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(runs["a"], tmp_path / "spoiled"))


def change_tensor(folder: Path, name: str, index: tuple[int, ...], value: float) -> None:
    """Rewrite a component with one element changed, by torch alone."""
    reader = FileSystemReader(folder)
    about = reader.read_metadata().state_dict_metadata
    tensors = {k: torch.empty(v.size, dtype=v.properties.dtype) for k, v in about.items()}
    load(tensors, storage_reader=reader, no_dist=True)
    tensors[name][index] = value
    for path in folder.glob("*.distcp"):
        path.unlink()
    save(tensors, storage_writer=FileSystemWriter(folder), no_dist=True)


@pytest.mark.promise("compare")
def test_a_weight_of_a_layer_counts_beyond_the_tolerance(runs, spoiled):
    folder = spoiled / "checkpoint" / "step-2" / "model"
    change_tensor(folder, "layers.1.attention.wq.weight", (0, 0), 1.0)
    assert compare(runs["a"], spoiled, "--tolerance=1e-4") == 1


def test_one_element_of_the_optimizer_is_named(runs, spoiled, capsys):
    """What no logged figure shows."""
    name = "layers.1.attention.wq.weight.exp_avg"
    change_tensor(spoiled / "checkpoint" / "step-2" / "optimizer", name, (3, 5), 2.0)
    assert compare(runs["a"], spoiled) == 1
    said = capsys.readouterr().out
    assert all(part in said for part in (f"step-2/optimizer, {name}: 1 of ", "[3, 5]: ", " 2.0, "))


def test_figures_missing_steps_components_and_the_data_position(runs, spoiled):
    first, _ = jobs.read_rows(spoiled)
    first["grad_norm"] += 0.5
    first["tokens_per_second"] = 1.0  # no two runs share this one
    (spoiled / "metrics.jsonl").write_text(json.dumps(first) + "\n")
    manifest = spoiled / "checkpoint" / "step-2" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["components"].remove("optimizer")
    del content["checksum"]
    manifest.write_bytes(seal(content))
    path = spoiled / "checkpoint" / "step-1" / "dataloader" / "state.json"
    path.write_text(path.read_text().replace('"position": 8', '"position": 9'))
    found = compare_runs(runs["a"], spoiled, folder="checkpoint", tolerance=0.0).differences
    assert found[0].startswith("step 1, grad_norm")
    assert any(text.startswith("step 2, ") for text in found)
    assert not any("tokens_per_second" in text for text in found)
    assert found[-2:] == ["step-1/dataloader, position: 8 and 9", "step-2/optimizer: only in A"]


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "equal"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0.0, True),
        ([2.0], [math.nan], 0.1, False),
        ([1.0, 2.0], [1.0, 2.001], 0.01, True),
        ([0.0], [-0.0], 0.0, False),
        ([0.0], [-0.0], 0.1, True),
        ([1.0], [1.0, 2.0], 0.1, False),
        ([math.inf], [math.inf], 0.0, True),
    ],
)
def test_tensors(a: list[float], b: list[float], tolerance: float, equal: bool) -> None:
    _, text = tensor_difference(torch.tensor(a), torch.tensor(b), tolerance=tolerance)
    assert (text == "") == equal


class Command:
    """A pickle of this runs a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch run",)


@pytest.mark.promise("no-code-from-checkpoints")
def test_a_crafted_checkpoint_is_refused_and_nothing_runs(runs, spoiled, capsys, monkeypatch):
    monkeypatch.chdir(spoiled)
    model = spoiled / "checkpoint" / "step-2" / "model"
    (model / ".metadata").write_bytes(pickle.dumps(Command()))
    assert compare(runs["a"], spoiled) == 2
    assert "model/.metadata" in capsys.readouterr().err
    assert not Path("run").exists()


def test_no_run_and_runs_without_rows_are_mistakes(tmp_path, capsys):
    for said in (str(tmp_path), "--folder"):
        assert compare(tmp_path, tmp_path) == 2
        assert said in capsys.readouterr().err
        (tmp_path / "metrics.jsonl").touch()
