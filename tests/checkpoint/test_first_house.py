"""Runs that the code before its redesigns saved: started from and generated from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from scripts import goldens
from scripts.golden.jobs import EXPERTS, FIXTURES, SMALLEST, write_data
from scripts.golden.ranks import add_smallest
from scripts.golden.record import read_tensors
from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.generate.sampling import generate
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.tools import generate as generate_script

RUNS = goldens.ROOT / FIXTURES / "first_house"
RUN = RUNS / "single" / "run"


@pytest.fixture
def smallest() -> Iterator[None]:
    add_smallest()
    yield
    del MODELS["llama3"].flavors["smallest"]


def check_start(
    run: Path,
    settings: str,
    ranks: RankPool,
    folder: Path,
    *,
    data: str = "examples.jsonl",
    name: str = "run",
    train: Callable[[list[str]], jobs.Result] = jobs.train,
) -> None:
    """Train a step from the weights of a stored run, and compare what it began with."""
    write_data(folder)
    step = run / "run" / "checkpoint" / "step-3"
    job = [
        f"--job.config_file={folder / 'base.toml'}",
        f"--job.dump_folder={folder / name}",
        *(f"--{word}" for word in settings.split()),
        f"--training.dataset_path={folder / data}",
        f"--training.dataset_cache={folder / 'cache'}",
        "--training.steps=1",
        f"--checkpoint.initial_load_path={step}",
    ]
    result = ranks.run(train, job, world=2)[0]
    stored = read_tensors(step / "model")
    assert result.initial.keys() == stored.keys()
    for key, weight in stored.items():
        assert torch.equal(result.initial[key], weight), key
    assert [row["step"] for row in result.rows] == [1]


def train_smallest(job: list[str]) -> jobs.Result:
    add_smallest()
    return jobs.train(job)


@pytest.mark.slow
def test_two_ranks_start_from_the_weights_of_one(ranks: RankPool, tmp_path: Path) -> None:
    """In the format of either house; tests/test_goldens.py resumes them."""
    check_start(RUNS / "single", SMALLEST, ranks, tmp_path, train=train_smallest)
    experts = goldens.ROOT / FIXTURES / "second_house" / "experts"
    check_start(experts, EXPERTS, ranks, tmp_path, data="documents.jsonl", name="experts")


def test_text_is_generated_from_their_weights(
    smallest: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(RUN, tmp_path / "run")
    arguments = ["--prompt", "red ", "--max_new_tokens", "8", "--temperature", "0"]
    assert generate_script.main(["--checkpoint", str(tmp_path / "run"), *arguments]) == 0
    model = Decoder(MODELS["llama3"].flavors["smallest"])
    model.load_state_dict(read_tensors(RUN / "checkpoint" / "step-3" / "model"))
    tokenizer = build_tokenizer("byte")
    ids = tokenizer.encode("red ")
    stop = {tokenizer.eos_id}
    [new] = generate(model, [ids], stop_ids=stop, max_new_tokens=8, temperature=0.0)
    text = tokenizer.decode([token for token in [*ids, *new] if token != tokenizer.eos_id])
    assert capsys.readouterr().out == text + "\n"
