"""A larger vocabulary: stored rows are kept, new rows are the same bits in any layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import hf_jobs, jobs
from tests.distributed.rank_pool import RankPool
from tests.models.reference import random_decoder, reference_of
from tests.naming import naming
from torchtitan.data.sampler import Permutation
from torchtitan.job import load_config
from torchtitan.models.families import MODELS, find_model

pytestmark = pytest.mark.slow

TINY8 = jobs.TINY.replace('"tiny"', '"tiny8"\nnum_layers = 2')
ROWS = 264
LARGER = ("--model.vocab_size=300", "--checkpoint.grow_vocab")
TP2 = ("--parallelism.tensor_parallel_degree=2",)
PP2 = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=4")
LAYOUTS = {
    "fsdp 3": (3, ("--training.global_batch_size=-1",)),
    "fsdp 2, tp 2": (4, TP2),
    "tp 2": (2, TP2),
    "pp 2": (2, PP2),
}


def near_mean(stored: Tensor) -> Tensor:
    """Return 36 new rows in float64 from a whole tensor, rounded once."""
    x, order = stored.double(), Permutation(ROWS, seed=0, epoch=0, source=0)
    near = (x[[order[row] for row in range(36)]] - x.mean(0)) * 1e-9**0.5 + x.mean(0)
    return near.float()


@pytest.fixture(scope="module")
def sources(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights as a checkpoint of ours, as plain DCP and as a folder of Hugging Face."""
    folder = tmp_path_factory.mktemp("sources")
    job = [*jobs.write_job(folder, TINY8), "--training.steps=1", "--optimizer.lr=0.1"]
    [result] = ranks.run(jobs.train, job, world=1)
    model = random_decoder(replace(MODELS["llama3"].flavors["tiny8"], num_layers=2))
    model.load_state_dict(result.final)
    reference_of(model).save_pretrained(folder / "hf")
    step = folder / "run" / "checkpoint" / "step-1"
    plain = folder / "plain"
    plain.mkdir()
    for file in (step / "model").iterdir():
        (plain / file.name).write_bytes(file.read_bytes())
    torch.save(result.final, folder / "model.pt")
    return {"ours": step, "plain": plain, "hf": folder / "hf", "pt": folder / "model.pt"}


def job_from(source: str, folder: Path, sources: dict[str, Path], *options: str) -> list[str]:
    job = [*jobs.write_job(folder, TINY8), f"--checkpoint.initial_load_path={sources[source]}"]
    return [*job, *(["--checkpoint.initial_load_in_hf"] if source == "hf" else []), *options]


@pytest.mark.promise("new-rows")
@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("ours", "fsdp 3"),
        ("plain", "tp 2"),
        ("pt", "pp 2"),
        ("hf", "fsdp 2, tp 2"),
    ],
)
def test_stored_rows_are_kept_and_the_others_start_near_their_mean(
    source: str, layout: str, ranks: RankPool, tmp_path: Path, sources: dict[str, Path]
) -> None:
    world, options = LAYOUTS[layout]
    stored = torch.load(sources["pt"], weights_only=True)
    job = job_from(source, tmp_path, sources, *LARGER, *options)
    each = ranks.run(hf_jobs.weights_and_step, job, world=world)
    found = {name: weights for part, _ in each for name, weights in part.items()}
    assert found.keys() == stored.keys()
    for name, weights in found.items():
        if name in ("tok_embeddings.weight", "output.weight"):
            assert weights.shape == (300, 32)
            assert torch.equal(weights[:ROWS], stored[name]), name
            assert torch.equal(weights[ROWS:], near_mean(stored[name])), name
        else:
            assert torch.equal(weights, stored[name]), name


def test_the_log_says_how_many_rows_are_kept(
    ranks: RankPool, tmp_path: Path, sources: dict[str, Path]
) -> None:
    for source in ("ours", "hf", "pt"):
        job = job_from(source, tmp_path, sources, *LARGER)
        [lines] = ranks.run(jobs.logged, job, world=1)
        assert sum(bool(naming("264 rows", "36 new rows").match(line)) for line in lines) == 2


@pytest.mark.parametrize("source", ["ours", "plain", "hf", "pt"])
def test_another_vocabulary_is_refused_unless_it_is_smaller_and_asked_for(
    source: str, ranks: RankPool, tmp_path: Path, sources: dict[str, Path]
) -> None:
    for options in ((LARGER[0],), ("--model.vocab_size=260", LARGER[1])):
        job = job_from(source, tmp_path, sources, *options)
        [said] = ranks.run(jobs.refusal, job, world=1)
        assert "264" in said
        assert "shape" in said or "vocab_size" in said


def test_stored_optimizer_state_of_fewer_rows_is_refused_by_its_shape(
    ranks: RankPool, tmp_path: Path, sources: dict[str, Path]
) -> None:
    goes_on = ("--checkpoint.mode=continue", "--checkpoint.initial_load_model_only=false")
    job = job_from("ours", tmp_path, sources, *LARGER, *goes_on, "--training.steps=4")
    [said] = ranks.run(jobs.refusal, job, world=1)
    assert "tok_embeddings.weight.exp_avg" in said
    assert "[264, 32], not [300, 32]" in said
    assert "checkpoint.exclude_from_loading" in said
    fresh = '--checkpoint.exclude_from_loading=["optimizer.tok_*", "optimizer.output.*"]'
    assert ranks.run(jobs.refusal, [*job, fresh], world=1) == ["no error"]


def test_it_is_the_models_for_all_that_ask() -> None:
    options = ["--model.vocab_size=300", "--model.flavor=tiny8"]
    assert find_model(load_config(options).model)[1].vocab_size == 300
