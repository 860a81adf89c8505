"""Weights of torchtitan 0.2, and of any other writer of plain DCP folders, as a beginning."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.distributed import hf_jobs, jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY
from tests.models.reference import random_decoder, reference_of
from tests.naming import naming
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.slow]

HALVES = ("attention.wq.weight", "attention.wk.weight", "q_norm.weight", "k_norm.weight")
QWEN3 = TINY.replace("[model]", '[model]\nname = "qwen3"')


class Command:
    """A pickle of this runs a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was_run",)


def weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Decoder(MODELS["llama3"].flavors["tiny"])
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


def qwen3(flavor: str = "tiny", **sizes: int) -> tuple[Decoder, dict[str, Tensor]]:
    """A Qwen3, and its weights as torchtitan 0.2 saves them: our names, the rows in halves, and the
    head also where it is the embedding."""
    model = random_decoder(replace(MODELS["qwen3"].flavors[flavor], **sizes))
    theirs = reference_of(model).state_dict()
    names = {**MODELS["qwen3"].hf.names, "output.weight": "lm_head.weight"}
    layers = range(model.config.num_layers)
    return model, {
        ours.replace("*", str(layer)): theirs[hf.replace("*", str(layer))].clone()
        for ours, hf in names.items()
        for layer in (layers if "*" in ours else (0,))
    }


def write(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


def job_from(folder: Path, source: Path, *options: str, toml: str = TINY) -> list[str]:
    path = f"--checkpoint.initial_load_path={source}"
    return [*jobs.write_job(folder, toml), path, *options]


@pytest.mark.promise("interchange", "no-code-from-checkpoints")
@pytest.mark.parametrize("world", [1, 2])
def test_the_weights_of_another_writer_are_a_beginning(
    world: int, ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchtitan 0.2 hands to DCP: parameters on top, the rest below its component. A pickle
    that lies beside them is never run."""
    monkeypatch.chdir(tmp_path)
    expected = weights()
    state = {f"{name}.exp_avg": torch.zeros_like(t) for name, t in expected.items()}
    everything = {
        **expected,
        "optimizer": {"state": state, "param_groups": {"norm.weight.lr": 1e-3}},
        "lr_scheduler": {"last_epoch": 7},
        "dataloader": {"dp_rank_0": b"a pickle", "world_size": 1},
        "train_state": Command(),
    }
    source = write(tmp_path / "theirs" / "step-7", everything)
    for model, step in ranks.run(hf_jobs.weights_and_step, job_from(tmp_path, source), world=world):
        assert step == 0
        assert model.keys() == expected.keys()
        assert all(torch.equal(model[name], expected[name]) for name in expected)
    folders = {tmp_path, *map(Path, ranks.run(os.getcwd, world=world))}
    assert not any((folder / "was_run").exists() for folder in folders)
    assert b"touch was_run" in next(source.glob("*.distcp")).read_bytes()  # the attack is there
    more = ["--checkpoint.mode=continue", "--checkpoint.initial_load_model_only=false"]
    for message in ranks.run(jobs.refusal, [*job_from(tmp_path, source), *more], world=world):
        assert naming(source, "manifest.json", "checkpoint.initial_load_model_only").match(message)


@pytest.mark.promise("interchange")
@pytest.mark.parametrize(
    ("dim", "saved_by", "world"),
    [(0, 2, 1), pytest.param(1, 5, 2, marks=pytest.mark.long)],
)
def test_a_qwen3_of_torchtitan_is_the_same_model(
    dim: int, saved_by: int, world: int, ranks: RankPool, tmp_path: Path
) -> None:
    """Names are equal, the rows of wq, wk and the norms of heads lie in another order."""
    model, theirs = qwen3()
    source = tmp_path / "step-7"
    ranks.run(hf_jobs.write_sharded, source, theirs, dim, world=saved_by)
    job = job_from(tmp_path, source, toml=QWEN3)
    expected = dict(model.named_parameters())
    for loaded, _ in ranks.run(hf_jobs.weights_and_step, job, world=world):
        for name, weight in expected.items():
            assert torch.equal(loaded[name], weight), name
            assert torch.equal(loaded[name], theirs[name]) is not name.endswith(HALVES)


def test_the_order_of_rows_can_be_set_and_is_stored(ranks: RankPool, tmp_path: Path) -> None:
    _, theirs = qwen3()
    job = job_from(tmp_path, write(tmp_path / "step-7", theirs), toml=QWEN3)
    ours = "--checkpoint.initial_load_rope=interleaved"
    [(loaded, _)] = ranks.run(hf_jobs.weights_and_step, [*job, ours], world=1)
    assert all(torch.equal(loaded[name], theirs[name]) for name in loaded)
    # what this library has written says so itself, wherever it is copied
    saved = [*jobs.write_job(tmp_path, QWEN3, name="saved"), "--training.steps=1"]
    [result] = ranks.run(jobs.train, saved, world=1)
    step = tmp_path / "saved" / "checkpoint" / "step-1"
    alone = Path(shutil.copytree(step / "model", tmp_path / "alone"))
    for source in (step / "model", alone):
        job = job_from(tmp_path, source, toml=QWEN3)
        [(loaded, _)] = ranks.run(hf_jobs.weights_and_step, job, world=1)
        assert all(torch.equal(loaded[name], result.final[name]) for name in loaded)
        [message] = ranks.run(jobs.refusal, [*job, ours.replace("interleaved", "halves")], world=1)
        assert "initial_load_rope" in message


def test_a_tied_head_that_was_saved_twice(ranks: RankPool, tmp_path: Path) -> None:
    """As torchtitan 0.2 saves its 0.6B, 1.7B and 4B. Another head than the embedding is refused."""
    model, theirs = qwen3("tiny8", num_layers=2)
    toml = QWEN3.replace('"tiny"', '"tiny8"\nnum_layers = 2').replace("size = 2", "size = 4")
    pp2 = "--parallelism.pipeline_parallel_degree=2"
    job = job_from(tmp_path, write(tmp_path / "step-7", theirs), pp2, toml=toml)
    expected = dict(model.named_parameters())
    for loaded, _ in ranks.run(hf_jobs.weights_and_step, job, world=2):
        assert loaded
        assert all(torch.equal(loaded[name], expected[name]) for name in loaded)
    theirs["output.weight"][-1, -1] += 1e-3
    job = job_from(tmp_path, write(tmp_path / "again", theirs), pp2, toml=toml)
    for message in ranks.run(jobs.refusal, job, world=2):
        assert naming("tok_embeddings.weight", "exclude_from_loading").match(message)


def test_a_part_of_a_tensor_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    """What rank 0 alone saves of a model under FSDP."""
    source = tmp_path / "step-7"
    ranks.run(hf_jobs.write_part, source, weights(), world=2)
    for message in ranks.run(jobs.refusal, job_from(tmp_path, source), world=2):
        assert any(f"'{name}'" in message for name in weights())
