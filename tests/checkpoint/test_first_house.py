"""Runs that the code before its redesign saved: resumed, started from and generated from."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from scripts import goldens
from scripts.golden.jobs import FIXTURES, JOBS, SMALLEST, write_data
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


@pytest.mark.timeout(600)
def test_they_are_resumed_bit_for_bit() -> None:
    """On one rank, on two, with adapters, and two as one; what is recorded is the whole run's."""
    check_resumed("first_house", num_jobs=4)


def check_resumed(house: str, *, num_jobs: int) -> None:
    names = [name for name, job in JOBS.items() if job.fixture.startswith(f"{house}/")]
    assert len(names) == num_jobs
    command = [sys.executable, goldens.__file__, "check", *names]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def check_start(
    run: Path,
    settings: str,
    ranks: RankPool,
    folder: Path,
    *,
    world: int,
    data: str = "examples.jsonl",
    train: Callable[[list[str]], jobs.Result] = jobs.train,
) -> None:
    """Train a step from the weights of a stored run, and compare what it began with."""
    write_data(folder)
    step = run / "run" / "checkpoint" / "step-3"
    job = [
        f"--job.config_file={folder / 'base.toml'}",
        f"--job.dump_folder={folder / 'run'}",
        *(f"--{word}" for word in settings.split()),
        f"--training.dataset_path={folder / data}",
        f"--training.dataset_cache={folder / 'cache'}",
        "--training.steps=1",
        f"--checkpoint.initial_load_path={step}",
    ]
    result = ranks.run(train, job, world=world)[0]
    stored = read_tensors(step / "model")
    assert result.initial.keys() == stored.keys()
    for name, weight in stored.items():
        assert torch.equal(result.initial[name], weight), name
    assert [row["step"] for row in result.rows] == [1]


def train_smallest(job: list[str]) -> jobs.Result:
    add_smallest()
    return jobs.train(job)


@pytest.mark.parametrize(("run", "world"), [("single", 2), ("fsdp2", 1)])
def test_a_run_starts_from_their_weights(
    run: str, world: int, ranks: RankPool, tmp_path: Path
) -> None:
    check_start(RUNS / run, SMALLEST, ranks, tmp_path, world=world, train=train_smallest)


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
