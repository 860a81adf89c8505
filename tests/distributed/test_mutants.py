"""Each bug of mutants.py is noticed by its oracle."""

from __future__ import annotations

import shutil
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
from tests.distributed.pipeline_jobs import TINY8
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_matrix import WHAT, WHERE
from tests.distributed.test_resume import Noisy, train_noisily

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
    where, options = WHERE[seen.where], WHAT[seen.what].options(texts)
    reference = on_one_device(pj.train, *options, evaluating=True)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *options, *where.options(seen.how)]
    results = run_mutated(ranks, job, name=name, train=pj.train, world=where.world)
    with pytest.raises(AssertionError):
        pj.assert_same_training(results, reference)


# --- other oracles


@seen_by("PyTorch")
def test_plain_pytorch_shows_it(
    name: str, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    """In the first two steps, of which the log shows the right learning rates."""
    losses, norms = on_one_device(by_torch.reference, toml=jobs.TINY)
    job = [*jobs.write_job(tmp_path, cache=cache), "--training.steps=2", jobs.UNSAVED]
    [result] = run_mutated(ranks, job, name=name, train=jobs.train, world=1)
    found = [(row["loss"], row["grad_norm"]) for row in result.rows]
    assert found != [
        pytest.approx(step, rel=1e-4) for step in zip(losses[:2], norms[:2], strict=True)
    ]


@seen_by("by sample")
def test_a_sample_at_a_time_shows_it(
    name: str, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*by_sample.validated(tmp_path, cache=cache), "--training.steps=1"]
    [result] = run_mutated(ranks, job, name=name, train=jobs.train, world=1)
    alone = [*job, jobs.UNSAVED, "--checkpoint.folder=none"]
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
    where, what = WHERE[seen.where], WHAT[seen.what]
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *what.options(texts)]
    job += where.options(seen.how)
    if "saved" in name:
        job.remove(jobs.UNSAVED)
        run_mutated(ranks, job, name=name, train=jobs.train, world=where.world)
        said = ranks.run(jobs.refusal, job, world=where.world)
    else:
        said = run_mutated(ranks, job, name=name, train=failure, world=where.world)
    assert all(seen.error in one for one in said), said
