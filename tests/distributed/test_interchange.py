"""Weights of torchtitan 0.2, and of any other writer of plain DCP folders, as a beginning."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
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


class Command:
    """A pickle of this runs a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch was_run",)


def weights() -> dict[str, Tensor]:
    torch.manual_seed(1)
    model = Decoder(MODELS["llama3"].flavors["tiny"])
    return {name: torch.randn_like(p) for name, p in model.named_parameters()}


HALVES = ("attention.wq.weight", "attention.wk.weight", "q_norm.weight", "k_norm.weight")


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


def everything() -> dict[str, Any]:
    """What torchtitan 0.2 hands to DCP: parameters on top, the rest below its component."""
    state = {f"{name}.exp_avg": torch.zeros_like(t) for name, t in weights().items()}
    return {
        **weights(),
        "optimizer": {"state": state, "param_groups": {"norm.weight.lr": 1e-3}},
        "lr_scheduler": {"last_epoch": 7},
        "dataloader": {"dp_rank_0": b"a pickle", "world_size": 1},
        "train_state": Command(),
    }


def write(folder: Path, state: dict[str, Any]) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return folder


QWEN3 = TINY.replace("[model]", '[model]\nname = "qwen3"')


def job_from(folder: Path, source: Path, *options: str, toml: str = TINY) -> list[str]:
    path = f"--checkpoint.initial_load_path={source}"
    folder.mkdir(exist_ok=True)
    return [*jobs.write_job(folder, toml), path, *options]


@pytest.mark.promise("interchange")
@pytest.mark.parametrize(("content", "world"), [(everything, 2), (weights, 1)])
def test_the_weights_of_another_writer_are_a_beginning(
    content: Callable[[], dict[str, Any]],
    world: int,
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    source = write(tmp_path / "theirs" / "step-7", content())
    expected = weights()
    job = job_from(tmp_path, source, "--checkpoint.mode=finetune")
    for model, step in ranks.run(hf_jobs.weights_and_step, job, world=world):
        assert step == 0
        assert model.keys() == expected.keys()
        assert all(torch.equal(model[name], expected[name]) for name in expected)


@pytest.mark.promise("no-code-from-checkpoints")
def test_pickles_that_lie_beside_are_never_run(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "step-7", everything())
    here = ranks.run(os.getcwd, world=1)[0]
    ran = [Path("was_run"), Path(here) / "was_run"]
    assert not any(path.exists() for path in ran)
    assert ranks.run(jobs.refusal, job_from(tmp_path, source), world=1) == ["no error"]
    assert not any(path.exists() for path in ran)
    payload = next(source.glob("*.distcp")).read_bytes()
    assert b"touch was_run" in payload  # the attack is there


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (lambda state: state.pop("norm.weight"), ["'norm.weight'"]),
        (lambda state: state.update(extra=torch.ones(1)), ["'extra'"]),
        (lambda state: state.update({"norm.weight": torch.ones(1)}), ["'norm.weight'", "[1]"]),
        (lambda state: state.update({"norm.weight": "text"}), ["'norm.weight'"]),
    ],
)
def test_what_does_not_fit_is_named(
    change: Callable[[dict[str, Any]], Any], values: list[str], ranks: RankPool, tmp_path: Path
) -> None:
    state = everything()
    change(state)
    source = write(tmp_path / "step-7", state)
    for message in ranks.run(jobs.refusal, job_from(tmp_path, source), world=2):
        assert naming(1, *values).match(message)
    pattern = '--checkpoint.exclude_from_loading=["norm.weight", "extra*"]'
    if not isinstance(state.get("norm.weight"), str):
        state["extras"] = torch.ones(1)  # both patterns stand for something
        state.setdefault("norm.weight", torch.ones(1))
        source = write(tmp_path / "again", state)
        job = job_from(tmp_path, source, pattern)
        assert ranks.run(jobs.refusal, job, world=1) == ["no error"]


@pytest.mark.parametrize("mode", ["recover", "continue"])
def test_more_than_weights_is_refused_with_what_to_do(
    mode: str, ranks: RankPool, tmp_path: Path
) -> None:
    source = write(tmp_path / "step-7", everything())
    options = [f"--checkpoint.mode={mode}", "--checkpoint.initial_load_model_only=false"]
    for message in ranks.run(jobs.refusal, job_from(tmp_path, source, *options), world=2):
        remedy = "checkpoint.initial_load_model_only = true"
        assert naming(source, "manifest.json", remedy).match(message)


def test_the_model_folder_of_an_own_step(ranks: RankPool, tmp_path: Path) -> None:
    """In its step it is verified, alone it is a plain folder."""
    saved = jobs.write_job(tmp_path, name="saved")
    [result] = ranks.run(jobs.train, [*saved, "--training.steps=1"], world=1)
    inside = tmp_path / "saved" / "checkpoint" / "step-1" / "model"
    alone = Path(shutil.copytree(inside, tmp_path / "alone"))
    for source in (inside, alone):
        job = job_from(tmp_path, source)
        [(model, step)] = ranks.run(hf_jobs.weights_and_step, job, world=1)
        assert step == 0
        assert all(torch.equal(model[name], result.final[name]) for name in model)
    file = next(inside.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    [message] = ranks.run(jobs.refusal, job_from(tmp_path, inside), world=1)
    assert naming("step-1", f"model/{file.name}").match(message)


@pytest.mark.parametrize("folder", ["", "checkpoint"])
def test_a_folder_of_steps_asks_for_the_name_of_one(
    folder: str, ranks: RankPool, tmp_path: Path
) -> None:
    """As torchtitan 0.2 leaves them: nothing tells which is whole."""
    run = tmp_path / "theirs"
    for step in (7, 14):
        write(run / "checkpoint" / f"step-{step}", weights())
    [message] = ranks.run(jobs.refusal, job_from(tmp_path, run / folder), world=1)
    assert str(run / "checkpoint") in message


@pytest.mark.promise("interchange")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(("saved_by", "world"), [(1, 1), (5, 2), (2, 4)])
@pytest.mark.long
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


def test_the_order_is_said_and_can_be_set(ranks: RankPool, tmp_path: Path) -> None:
    _, theirs = qwen3()
    source = write(tmp_path / "step-7", theirs)
    job = job_from(tmp_path, source, toml=QWEN3)
    key = "checkpoint.initial_load_rope"
    [line] = [line for line in ranks.run(jobs.logged, job, world=1)[0] if key in line]
    assert naming("wq", "wk", "0.2", "qwen3", "halves").match(line)
    ours = "--checkpoint.initial_load_rope=interleaved"
    [(loaded, _)] = ranks.run(hf_jobs.weights_and_step, [*job, ours], world=1)
    assert all(torch.equal(loaded[name], theirs[name]) for name in loaded)
    # what this library has written says so itself, wherever it is copied
    (source / "state.json").write_text('{"rope": "interleaved"}')
    [(loaded, _)] = ranks.run(hf_jobs.weights_and_step, job, world=1)
    assert all(torch.equal(loaded[name], theirs[name]) for name in loaded)
    [message] = ranks.run(jobs.refusal, [*job, "--checkpoint.initial_load_rope=halves"], world=1)
    assert "checkpoint.initial_load_rope" in message
    (source / "state.json").write_text('{"rope": "sideways"}')
    assert naming("rope", "interleaved", "halves").match(ranks.run(jobs.refusal, job, world=1)[0])
    llama = write(tmp_path / "llama", weights())
    lines = ranks.run(jobs.logged, job_from(tmp_path / "another", llama), world=1)[0]
    assert any(map(naming("0.2", "llama3", "interleaved").match, lines))


def test_an_own_step_says_the_order_itself(ranks: RankPool, tmp_path: Path) -> None:
    saved = jobs.write_job(tmp_path, QWEN3, name="saved")
    [result] = ranks.run(jobs.train, [*saved, "--training.steps=1"], world=1)
    step = tmp_path / "saved" / "checkpoint" / "step-1"
    alone = Path(shutil.copytree(step / "model", tmp_path / "alone"))
    [(model, _)] = ranks.run(
        hf_jobs.weights_and_step, job_from(tmp_path, alone, toml=QWEN3), world=1
    )
    assert all(torch.equal(model[name], result.final[name]) for name in model)
    halves = "--checkpoint.initial_load_rope=halves"
    [message] = ranks.run(jobs.refusal, job_from(tmp_path, step, halves, toml=QWEN3), world=1)
    assert "initial_load_rope" in message


@pytest.mark.parametrize("layout", [(), ("--parallelism.pipeline_parallel_degree=2",)])
def test_a_tied_head_that_was_saved_twice(
    layout: tuple[str, ...], ranks: RankPool, tmp_path: Path
) -> None:
    """As torchtitan 0.2 saves its 0.6B, 1.7B and 4B."""
    model, theirs = qwen3("tiny8", num_layers=2)
    assert torch.equal(theirs["output.weight"], theirs["tok_embeddings.weight"])
    source = write(tmp_path / "step-7", theirs)
    toml = QWEN3.replace('"tiny"', '"tiny8"\nnum_layers = 2').replace(
        "batch_size = 2", "batch_size = 4"
    )
    job = job_from(tmp_path, source, *layout, toml=toml)
    expected = dict(model.named_parameters())
    for loaded, _ in ranks.run(hf_jobs.weights_and_step, job, world=2):
        assert loaded
        assert all(torch.equal(loaded[name], expected[name]) for name in loaded)
    theirs["output.weight"][-1, -1] += 1e-3
    again = write(tmp_path / "again", theirs)
    for message in ranks.run(jobs.refusal, job_from(tmp_path, again, *layout, toml=toml), world=2):
        assert "tok_embeddings.weight" in message
        assert 'exclude_from_loading = ["output.weight"]' in message
    pattern = '--checkpoint.exclude_from_loading=["output.weight"]'
    if not layout:
        job = job_from(tmp_path, again, pattern, toml=toml)
        assert set(ranks.run(jobs.refusal, job, world=2)) == {"no error"}


def test_a_part_of_a_tensor_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    """What rank 0 alone saves of a model under FSDP."""
    source = tmp_path / "step-7"
    ranks.run(hf_jobs.write_part, source, weights(), world=2)
    for message in ranks.run(jobs.refusal, job_from(tmp_path, source), world=2):
        assert re.search(r"0 of [\d,]+ of '\S+'", message)
