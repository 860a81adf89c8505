"""Each bug of mutants.py is noticed: by the right oracle, in the right figure and step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.utils.checkpoint import CheckpointError

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed import test_reference as by_torch
from tests.distributed import test_validation as by_sample
from tests.distributed.conftest import OneDevice
from tests.distributed.mutants import MUTANTS, WHAT, WHERE, Seen
from tests.distributed.pipeline_jobs import TINY8
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_resume import EXACT, Noisy, train_noisily
from torchtitan.tools.compare.layouts import gaps

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


def differences(results: list[pj.Trained], reference: pj.Trained) -> Iterator[tuple[str, float]]:
    """Yield what is not as on one device, in the order of `Seen`, and by how much of the right
    value."""
    initial = pj.whole(results, lambda result: result.initial)
    for name, weights in reference.initial.items():
        if not initial[name].equal(weights):
            yield f"initial {name}", 1.0
    gradients = pj.whole(results, lambda result: result.gradients)
    for ours, theirs in zip(results[0].rows, reference.rows, strict=True):
        yield from unequal_figures(ours, theirs, ("loss",))
        if theirs["step"] == 1:
            for name, wanted in reference.gradients.items():
                gap = gaps.compare_gradients({name: wanted}, {name: gradients[name]}).largest
                if gap > gaps.GRADIENTS_TOLERANCE:
                    yield f"gradient {name}", gap
        others = sorted(key for key in theirs if key.startswith("router/"))
        yield from unequal_figures(ours, theirs, ("grad_norm", *others))
    final = pj.whole(results, lambda result: result.final)
    for name in reference.final:
        of_one = ({name: each[name]} for each in (reference.initial, reference.final, final))
        gap = gaps.compare_weights(*of_one).largest
        if gap > gaps.WEIGHTS_TOLERANCE:
            yield f"final {name}", gap


def unequal_figures(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], keys: tuple[str, ...]
) -> Iterator[tuple[str, float]]:
    for key in keys:
        if isinstance(theirs[key], list):  # counts
            gap = float(ours[key] != theirs[key])
        else:
            gap = abs(ours[key] - theirs[key]) / (abs(theirs[key]) or 1.0)
        if not gap <= gaps.TOLERANCES.get(key, 1e-4):
            yield f"{key} {theirs['step']}", gap


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
    where, what = WHERE[seen.where], WHAT[seen.what]
    options, sizes = what.options(texts), what.all_sizes
    reference = on_one_device(pj.train, *options, sizes=sizes)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *options, *where.options(seen.how)]
    results = run_mutated(ranks, job, name=name, train=pj.train, sizes=sizes, world=where.world)
    found = dict(differences(results, reference))
    first = next(iter(found), "no difference")
    assert fnmatchcase(first, seen.first), found
    sizes_of = {key: size for key, size in found.items() if fnmatchcase(key, seen.first)}
    if seen.size is not None:
        assert list(sizes_of.values()) == pytest.approx([seen.size] * len(sizes_of), rel=1e-3)
    if seen.alone:
        expected = [f"gradient {key}" for key in reference.gradients]
        expected = [key for key in expected if fnmatchcase(key, seen.first)]
        assert [key for key in found if key.startswith("gradient ")] == expected


# --- other oracles


@seen_by("PyTorch")
def test_plain_pytorch_shows_it(
    name: str, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    """In the first two steps, of which the log shows the right learning rates."""
    losses, norms = on_one_device(by_torch.reference, toml=jobs.TINY)
    job = [*jobs.write_job(tmp_path, cache=cache), "--training.steps=2", jobs.UNSAVED]
    [result] = run_mutated(ranks, job, name=name, train=jobs.train, world=1)
    found = [
        key
        for step, row in enumerate(result.rows)
        for key, wanted, rel in (("loss", losses, 1e-5), ("grad_norm", norms, 1e-4))
        if row[key] != pytest.approx(wanted[step], rel=rel)
        for key in [f"{key} {step + 1}"]
    ]
    assert found[:1] == [seen.first]


@seen_by("by sample")
def test_a_sample_at_a_time_shows_it(
    name: str, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*by_sample.validated(tmp_path, cache=cache), "--training.steps=1"]
    [result] = run_mutated(ranks, job, name=name, train=by_sample.train, world=1)
    alone = [*job, jobs.UNSAVED, "--checkpoint.folder=none"]
    [expected] = ranks.run(by_sample.by_hand, alone, result.final, world=1)
    figure, _ = seen.first.split()
    assert result.rows[0][figure] != pytest.approx(expected, rel=1e-2)


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
    found = [
        f"{key} {step}"
        for step, rows in enumerate(zip(result.rows, unstopped.rows, strict=True), start=1)
        for key, ours, theirs in zip(EXACT, *rows, strict=True)
        if ours != theirs
    ]
    assert found[:1] == [seen.first]
    assert result.state_hash != unstopped.state_hash


# --- errors


def failure(job: list[str], *, sizes: Mapping[str, Any]) -> str:
    try:
        pj.train(job, sizes=sizes)
    except CheckpointError as error:  # of recomputation
        return str(error)
    return "no error"


def save(job: list[str], *, sizes: Mapping[str, Any]) -> None:
    with jobs.changed_flavor(job, "tiny8", sizes):
        jobs.train(job)


def refusal(job: list[str], *, sizes: Mapping[str, Any]) -> str:
    with jobs.changed_flavor(job, "tiny8", sizes):
        return jobs.refusal(job)


@seen_by("error")
def test_an_error_shows_it(
    name: str, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path, texts: Path
) -> None:
    """Of torch in a recomputation, or of the trainer when it loads what was saved."""
    where, what = WHERE[seen.where], WHAT[seen.what]
    sizes = what.all_sizes
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *what.options(texts)]
    job += where.options(seen.how)
    if "saved" in name:
        job.remove(jobs.UNSAVED)
        run_mutated(ranks, job, name=name, train=save, sizes=sizes, world=where.world)
        said = ranks.run(refusal, job, sizes=sizes, world=where.world)
    else:
        said = run_mutated(ranks, job, name=name, train=failure, sizes=sizes, world=where.world)
    assert all(seen.first in one for one in said), said
