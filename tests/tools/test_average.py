"""The average of checkpoints, against a loop over what PyTorch's own reader loads from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.api import load_generator
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.checksums import MANIFEST, verify
from torchtitan.tools.average import write_average
from torchtitan.tools.convert import main
from torchtitan.tools.tensors import StoredTensors

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.slow]
STEPS = (1, 2, 3)


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs of three checkpoints; tensors of the first lie in pieces of two ranks."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    tied = ["--training.dtype=bfloat16", "--model.tie_embeddings"]
    for name, more in ("float32", []), ("bfloat16", tied), ("adapter", ["--lora.rank=2"]):
        job = jobs.write_job(folder, name=name)
        job += ["--checkpoint.interval=1", "--training.steps=3", "--checkpoint.keep_latest_k=0"]
        ranks.run(jobs.train, [*job, *more], world=1 if more else 2)
        found[name] = folder / name
    return found


def load(folder: Path) -> dict[str, Tensor]:
    about = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(e.size, dtype=e.properties.dtype) for name, e in about.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def expected(run: Path, *, decay: float | None) -> dict[str, Tensor]:
    """The mean, or the recurrence as it is written, in float64."""
    states = [load(run / "checkpoint" / f"step-{step}" / "model") for step in STEPS]
    result = {}
    for name, first in states[0].items():
        if decay is None:
            mean = torch.stack([state[name].double() for state in states]).mean(0)
        else:
            mean = first.double()
            for state in states[1:]:
                mean = decay * mean + (1 - decay) * state[name].double()
        result[name] = mean.to(first.dtype)
    return result


@pytest.mark.promise("tools")
@pytest.mark.parametrize(("name", "decay"), [("float32", None), ("bfloat16", 0.75)])
def test_equals_the_recurrence(runs, name: str, decay: float | None, tmp_path: Path) -> None:
    kind = [] if decay is None else ["--decay", str(decay)]
    assert main(["average", str(runs[name]), str(tmp_path / "out"), *kind]) == 0
    found, wanted = load(tmp_path / "out" / "model"), expected(runs[name], decay=decay)
    assert found.keys() == wanted.keys()
    assert ("output.weight" in found) == (name == "float32")
    last = load(runs[name] / "checkpoint" / "step-3" / "model")
    assert any(not torch.equal(found[key], last[key]) for key in found)
    for key, tensor in found.items():
        assert tensor.dtype == wanted[key].dtype == getattr(torch, name)
        assert torch.equal(tensor, wanted[key])
    assert verify(tmp_path / "out", group=None) == []


def test_training_and_transformers_load_it(runs, ranks: RankPool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["average", str(runs["float32"]), str(out)]) == 0
    wanted = load(out / "model")
    job = [*jobs.write_job(tmp_path), f"--checkpoint.initial_load_path={out}"]
    job += ["--checkpoint.mode=finetune", "--training.steps=1"]
    initial = ranks.run(jobs.train, job, world=2)[0].initial
    model = load_generator(out, device=torch.device("cpu")).model
    for name, parameter in model.named_parameters():
        assert torch.equal(initial[name], wanted[name])
        assert torch.equal(parameter, wanted[name])
    assert main(["to-hf", str(out), str(tmp_path / "hf")]) == 0
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], wanted["output.weight"])


@pytest.mark.parametrize(
    ("other", "is_averaged"),
    [
        (torch.ones(5, 8), False),
        (torch.ones(4, 8, dtype=torch.int64), True),
        (torch.zeros(4, 8, dtype=torch.int64), False),
    ],
    ids=["another shape", "equal integers", "other integers"],
)
def test_tensors_without_an_average(runs, tmp_path: Path, other: Tensor, is_averaged: bool) -> None:
    steps = [tmp_path / "step-1", tmp_path / "step-2"]
    for step, w in zip(steps, (torch.ones((4, 8), dtype=other.dtype), other), strict=True):
        dcp.save({"w": w}, storage_writer=dcp.FileSystemWriter(step / "model"), no_dist=True)
        shutil.copy(runs["float32"] / "checkpoint" / "step-1" / MANIFEST, step)
    if not is_averaged:
        with pytest.raises(CheckpointError, match="'w'"):
            write_average(steps, tmp_path / "out", decay=None)
        return
    write_average(steps, tmp_path / "out", decay=0.5)
    assert torch.equal(StoredTensors(tmp_path / "out", "model")["w"], other)


@pytest.mark.parametrize(
    ("run", "more", "named"),
    [
        ("float32", ["out", "--decay=1"], "--decay"),
        ("float32", ["out", "--steps=1,9"], "1, 9"),
        ("float32", ["."], "exists"),
        ("adapter", ["out"], "LoRA"),
    ],
)
def test_refused(runs, run, more, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["average", str(runs[run]), *more]) == 2
    assert named in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_damaged_and_other_models(runs, tmp_path: Path, capsys) -> None:
    folder = Path(shutil.copytree(runs["float32"] / "checkpoint", tmp_path / "mixed"))
    file = next((folder / "step-2" / "model").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    words = ["average", str(folder), str(tmp_path / "out")]
    assert main(words) == 2
    assert "step-2" in capsys.readouterr().err
    assert main([*words, "--steps", "1,3"]) == 0
    for path in (folder / "step-2", tmp_path / "out"):
        shutil.rmtree(path)
    shutil.copytree(runs["bfloat16"] / "checkpoint" / "step-2", folder / "step-2")
    assert main(words) == 2
    assert "step-2" in capsys.readouterr().err
