"""The command there and back, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tokenizers import Tokenizer, models

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.tools import convert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Result]:
    """A run with a tokenizer of Hugging Face's kind."""
    folder = tmp_path_factory.mktemp("trained")
    write_tokenizer(folder / "tokenizer")
    job = [*jobs.write_job(folder), f"--model.tokenizer_path={folder / 'tokenizer'}"]
    return folder, ranks.run(jobs.train, [*job, "--training.steps=1"], world=2)[0]


def write_tokenizer(folder: Path) -> None:
    folder.mkdir()
    words = {"<unk>": 0, "<eos>": 1, **{chr(i): i for i in range(2, 128)}}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "model.safetensors").touch()


@pytest.mark.promise("hf")
def test_there_and_back(trained, ranks: RankPool, tmp_path, capsys) -> None:
    folder, result = trained
    out, weights = tmp_path / "hf", tmp_path / "weights"
    assert convert.main(["to-hf", str(folder / "run"), str(out)]) == 0
    capsys.readouterr()
    for name in ("tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (folder / "tokenizer" / name).read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["max_position_embeddings"]) == (1, 32)

    assert convert.main(["from-hf", str(out), str(weights)]) == 0
    _, *settings = capsys.readouterr().out.splitlines()
    state = Decoder(MODELS["llama3"].flavors["tiny"]).state_dict()
    dcp.load(state, storage_reader=dcp.FileSystemReader(weights), no_dist=True)
    assert all(torch.equal(state[name], result.final[name]) for name in state)
    sizes = [f"--{setting.replace(' = ', '=')}" for setting in settings]
    job = [*jobs.write_job(tmp_path), f"--checkpoint.initial_load_path={weights}", *sizes]
    assert ranks.run(jobs.refusal, job, world=1) == ["no error"]


def test_another_type_and_another_tokenizer(trained, tmp_path, capsys) -> None:
    """Also where the run's own is gone."""
    folder, result = trained
    moved = shutil.copytree(folder / "run" / "checkpoint" / "step-1", tmp_path / "step-1")
    command = ["to-hf", str(moved), str(tmp_path / "hf"), "--dtype", "bfloat16"]
    (folder / "tokenizer").rename(tmp_path / "moved")
    codes = [convert.main(command), convert.main([*command, "--tokenizer", "byte"])]
    (tmp_path / "moved").rename(folder / "tokenizer")
    assert codes == [2, 0]
    assert "--tokenizer" in capsys.readouterr().err
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    rounded = result.final["norm.weight"].bfloat16()
    assert torch.equal(weights["model.norm.weight"], rounded)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 257
    assert not (tmp_path / "hf" / "tokenizer.json").exists()


def test_mistakes_write_nothing(trained, tmp_path, capsys) -> None:
    run, mine, out = str(trained[0] / "run"), tmp_path / "mine", tmp_path / "out"
    mine.mkdir()
    nothing = str(tmp_path / "nothing")
    for direction in ("to-hf", "from-hf"):
        for words, said in ((run, str(mine)), str(mine)), ((nothing, str(out)), nothing):
            assert convert.main([direction, *words]) == 2
            assert said in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [mine]
