"""Each bug of mutants.py is noticed by its oracle."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.utils.checkpoint import CheckpointError

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed import test_reference as by_torch
from tests.distributed import test_validation as by_sample
from tests.distributed.conftest import OneDevice
from tests.distributed.mutants import MUTANTS, Seen
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_resume import Noisy, train_noisily
from tests.jobs import LAYOUTS, MODELS, TINY, TINY8, UNSAVED

pytestmark = pytest.mark.long

T = TypeVar("T")


def seen_by(oracle: str) -> pytest.MarkDecorator:
    found = [(name, seen) for name in MUTANTS for seen in MUTANTS[name].seen]
    found = [(name, seen) for name, seen in found if seen.oracle == oracle]
    ids = ["; ".join(filter(None, (n, seen.where, seen.what, seen.how))) for n, seen in found]
    return pytest.mark.parametrize(("name", "seen"), found, ids=ids)


def mutated(
    job: list[str], *, name: str, train: Callable[..., T], **settings: Any
) -> tuple[T, set[str]]:
    """Train with a bug on this rank; return which wrong code was called, too."""
    with MUTANTS[name].planted() as called:
        return train(job, **settings), called


def run_mutated(
    ranks: RankPool, job: list[str], *, name: str, world: int, **settings: Any
) -> list[Any]:
    results = ranks.run(mutated, job, name=name, world=world, **settings)
    # what is never called would show nothing
    assert set().union(*(called for _, called in results)) == MUTANTS[name].names
    return [result for result, _ in results]


# --- one device


@pytest.mark.promise("oracles-can-fail")
@seen_by("one device")
def test_one_device_shows_it(
    name: str,
    seen: Seen,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    texts: Path,
    on_one_device: OneDevice,
) -> None:
    where, options = LAYOUTS[seen.where], MODELS[seen.what].options(texts)
    reference = on_one_device(pj.train, *options, evaluating=True)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *options, *where.options(seen.how)]
    results = run_mutated(ranks, job, name=name, train=pj.train, world=where.world)
    with pytest.raises(AssertionError):
        pj.assert_same_training(results, reference)


# --- other oracles


@pytest.mark.promise("oracles-can-fail")
@seen_by("PyTorch")
def test_plain_pytorch_shows_it(
    name: str, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    """In the first two steps, of which the log shows the right learning rates."""
    losses, norms = on_one_device(by_torch.reference, toml=TINY)
    job = [*jobs.write_job(tmp_path, cache=cache), "--training.steps=2", UNSAVED]
    [result] = run_mutated(ranks, job, name=name, train=jobs.train, world=1)
    found = [(row["loss"], row["grad_norm"]) for row in result.rows]
    assert found != [
        pytest.approx(step, rel=1e-4) for step in zip(losses[:2], norms[:2], strict=True)
    ]


@pytest.mark.promise("oracles-can-fail")
@seen_by("by sample")
def test_a_sample_at_a_time_shows_it(
    name: str, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*by_sample.validated(tmp_path, cache=cache), "--training.steps=1"]
    [result] = run_mutated(ranks, job, name=name, train=jobs.train, world=1)
    alone = [*job, UNSAVED, "--checkpoint.folder=none"]
    [expected] = ranks.run(by_sample.by_hand, alone, result.final, world=1)
    assert result.rows[0]["validation_loss"] != pytest.approx(expected, rel=1e-2)


@pytest.fixture(scope="module")
def unstopped(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Noisy:
    job = jobs.write_job(tmp_path_factory.mktemp("unstopped"), cache=cache)
    [[[result]]] = ranks.run(train_noisily, [(job, (4,))], world=1)
    return result


@pytest.fixture(scope="module")
def stopped(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The folder of the same run, stopped after two steps."""
    folder = tmp_path_factory.mktemp("stopped")
    ranks.run(train_noisily, [(jobs.write_job(folder, cache=cache), (2,))], world=1)
    return folder / "run"


def resume(job: list[str]) -> Noisy:
    [[result]] = train_noisily([(job, (4,))])
    return result


@pytest.mark.promise("oracles-can-fail")
@seen_by("unstopped")
def test_a_run_that_was_never_stopped_shows_it(
    name: str,
    seen: Seen,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    unstopped: Noisy,
    stopped: Path,
) -> None:
    shutil.copytree(stopped, tmp_path / "run")
    job = jobs.write_job(tmp_path, cache=cache)
    [result] = run_mutated(ranks, job, name=name, train=resume, world=1)
    assert result.rows != unstopped.rows
    assert result.state_hash != unstopped.state_hash


# --- errors


def failure(job: list[str]) -> str:
    try:
        pj.train(job)
    except CheckpointError as error:  # of recomputation
        return str(error)
    return "no error"


@seen_by("error")
def test_an_error_shows_it(
    name: str, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path, texts: Path
) -> None:
    """Of torch in a recomputation, or of the trainer when it loads what was saved."""
    where, what = LAYOUTS[seen.where], MODELS[seen.what]
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *what.options(texts)]
    job += where.options(seen.how)
    if "saved" in name:
        job.remove(UNSAVED)
        run_mutated(ranks, job, name=name, train=jobs.train, world=where.world)
        said = ranks.run(jobs.refusal, job, world=where.world)
    else:
        said = run_mutated(ranks, job, name=name, train=failure, world=where.world)
    assert all(seen.error in one for one in said), said


# --- another test with another oracle

ALONE = "distributed/test_document_layouts.py::test_as_if_each_document_were_alone"
FLOAT64 = "distributed/test_reference.py::test_other_parameters_are_trained_after_a_continue"
LOADS = "distributed/test_resharding.py::test_a_checkpoint_loads_into_other_layouts"
GRADIENTS = "distributed/test_tensor_layouts.py::test_every_parameters_gradient"
ALSO_SEEN = {
    "data/test_documents.py::test_lengths_and_labels_of_samples[block_causal-False]": [
        "labels across documents"
    ],
    "data/test_loader.py::test_resume_continues_with_the_next_sample[0-0]": [
        "position one sample on"
    ],
    "distributed/test_balance.py::test_recomputed_choices_are_counted_once": [
        "choices counted again"
    ],
    "distributed/test_context_layouts.py::test_a_rank_whose_labels_are_all_masked[allgather]": [
        "a masked label is learnt"
    ],
    f"{ALONE}[cp 2, ring, balanced]": ["gradients not summed over cp"],
    f"{ALONE}[pp 2]": ["documents of the first microbatch"],
    "distributed/test_experts.py::test_recomputation_chooses_the_same_experts": [
        "experts chosen anew",
        "experts and numbers of rows chosen anew",
    ],
    "distributed/test_own_things.py::test_data_of_ones_own_are_validated_on[validation]": [
        "masked labels count in the validation"
    ],
    "distributed/test_reference.py::test_losses_and_norms[1]": [
        "mean of means",
        "each rank counts the loss",
        "microbatch dropped",
        "tokens counted on each tp rank",
    ],
    "distributed/test_reference.py::test_losses_and_norms[2]": [
        "norm of the own shard",
        "gradients averaged",
    ],
    f"{FLOAT64}[all, ddp 2]": ["copies not reduced"],
    f"{FLOAT64}[all, tied, pp 2 ZBV x ddp 2]": [
        "tied copy stale",
        "tied gradient lost",
        "copies not reduced in a pipeline",
    ],
    f"{FLOAT64}[all]": ["optimizer not restored"],
    f"{FLOAT64}[others, pp 2]": [
        "microbatch dropped in a pipeline",
        "stages in the wrong order",
        "gradients divided by microbatches",
    ],
    f"{LOADS}[experts-fsdp 3-targets6]": ["experts of one rank saved"],
    "distributed/test_resume.py::test_another_number_of_ranks_goes_on_at_the_next_sample": [
        "learning rate a step late"
    ],
    f"{GRADIENTS}[ep 2, fsdp 2-qwen3_moe-sizes8]": ["gradients of experts averaged"],
    f"{GRADIENTS}[ep 2-qwen3_moe-sizes7]": ["gradients of experts times ep"],
    f"{GRADIENTS}[tp 2-deepseek_v3-sizes9]": [
        "latents keep the gradient of own heads",
        "latents keep the gradient of own tokens",
    ],
    f"{GRADIENTS}[tp 2-llama3-sizes0]": [
        "rows of a tp shard in another order",
        "norms not summed over tp",
        "gathered inputs keep their own gradient",
    ],
    f"{GRADIENTS}[tp 2-qwen3_moe-sizes6]": ["gate not summed over tp"],
    "finetune/test_new_rows.py::test_only_new_rows_change_in_every_layout[llama3-tp 2]": [
        "copied adapters keep their own gradient"
    ],
    "models/test_documents.py::test_lengths_are_dealt_out_to_sequences": [
        "documents end a token late"
    ],
    "models/test_init_layouts.py::test_each_rank_fills_its_own_shard[fsdp 2]": [
        "uneven shards begin elsewhere"
    ],
    "models/test_moe.py::test_experts_are_what_the_definition_says[softmax]": [
        "results combined by another index"
    ],
    "optim/test_balance.py::test_figures": ["biases moved by own counts"],
    "optim/test_balance.py::test_losses_and_their_gradients[config0-used1]": [
        "balance divided by the microbatch"
    ],
    "optim/test_balance.py::test_losses_and_their_gradients[config0-used2]": [
        "global loss by counts of this step"
    ],
    "optim/test_balance.py::test_ranks_that_share_a_sequence_count_it_together": [
        "sequences balanced by their parts"
    ],
    "optim/test_clip.py::test_shards_and_copies_have_the_norm_of_one_device": [
        "copies count in the norm"
    ],
    "optim/test_loss.py::test_parts_of_the_vocabulary_give_the_whole[some due-2]": [
        "largest logit not shared"
    ],
    "optim/test_muon.py::test_any_shards_are_updated_as_on_one_device": [
        "copies of a matrix not updated",
        "each shard orthogonalised alone",
    ],
    "parallel/test_context_attention.py::test_output_and_gradients[allgather-headtail-2]": [
        "attention to the own cp shard alone"
    ],
    "parallel/test_context_layout.py::test_a_batch_and_the_positions_are_cut_alike": [
        "labels shifted in a cp shard",
        "labels of another cp layout",
        "positions of the cp shard alone",
    ],
    "parallel/test_pipeline_layout.py::test_refusals[keys7-parts7]": [
        "weights freed between halved backwards"
    ],
}
"""Tests, each with the bugs that it sees too, by an oracle other than that of `seen`."""


def test_each_has_two_killers() -> None:
    """But for generators, of which a run that was never stopped tells alone."""
    found = [name for names in ALSO_SEEN.values() for name in names]
    assert sorted([*found, "generators not restored"]) == sorted(MUTANTS)


@pytest.mark.promise("oracles-can-fail")
@pytest.mark.parametrize("test", ALSO_SEEN)
def test_another_test_fails(test: str, warm_python: Path) -> None:
    """It passes without a bug, and fails with each that it is said to see."""

    def passes(name: str) -> bool:
        command = [warm_python, "-m", "pytest", "-p", "tests.distributed.plant", f"tests/{test}"]
        done = subprocess.run(
            command, env={**os.environ, "PLANT": name}, capture_output=True, text=True
        )
        assert done.returncode in (0, 1), done.stdout + done.stderr
        return done.returncode == 0

    assert [name for name in ("", *ALSO_SEEN[test]) if passes(name)] == [""]
