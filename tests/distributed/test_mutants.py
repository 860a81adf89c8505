"""Bugs that trainers had, each planted in the running code: the comparison with one device sees it.

A mutant is a line of a function and what it becomes, with the row of test_matrix.py, where the same
job passes without it, that must fail.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_matrix import OF_FAMILIES, TABLE
from tests.jobs import LAYOUTS, MODELS, TINY8
from torchtitan.data.documents import TextSource
from torchtitan.optim.balance import Balance
from torchtitan.optim.clip import global_norm, num_copies
from torchtitan.optim.loss import _Head
from torchtitan.parallel import activation, expert, tensor
from torchtitan.parallel.context.shard import SequenceShard
from torchtitan.parallel.execution import Batch, WholeModel
from torchtitan.parallel.pipeline.execution import TiedEmbedding
from torchtitan.trainer import Trainer

pytestmark = pytest.mark.long

ROWS = [*TABLE, *OF_FAMILIES]
MUTANTS: dict[str, tuple[Callable[..., Any], str, str, str]] = {
    "loss per rank": (
        Trainer._train_step,
        "divisors = sync.sum_valid(num_valid).clamp(min=1)",
        "sync.sum_valid(num_valid); divisors = num_valid.clamp(min=1)",
        "fsdp 2; few; by operator, kept",
    ),
    "microbatch dropped": (
        WholeModel.forward_backward,
        "enumerate(batches)",
        "enumerate(batches[1:])",
        "hsdp 2x2; tied; accumulating, chunks",
    ),
    "rate a step early": (
        Trainer._train_step,
        "run.schedule(step)",
        "run.schedule(step + 1)",
        "one device; all; recomputed, accumulating, offloaded",
    ),
    "norm of a shard": (
        global_norm,
        "dist.all_reduce(total)",
        "pass",
        "fsdp 2; few; by operator, kept",
    ),
    "copies count in the norm": (
        num_copies,
        "copies *= ",
        "copies += 0 * ",
        "fsdp 2 x tp 2; few; recomputed, offloaded, chunks",
    ),
    "labels of other tokens": (
        SequenceShard.take,
        "_pick(labels_BS, token_indices)",
        "_pick(labels_BS, token_indices.flip(-1))",
        "cp 2 ring; few; recomputed, accumulating",
    ),
    "positions of the shard": (
        SequenceShard.take,
        "positions = token_indices\n",
        "positions = torch.arange(len(token_indices))\n",
        "cp 2 ring; few; recomputed, accumulating",
    ),
    "tied copy stale": (
        TiedEmbedding.refresh_copy,
        "copy.copy_(received)",
        "pass",
        "pp 2 ZBV; tied; kept",
    ),
    "documents of other rows": (
        Batch._rows,
        "self.documents[rows]",
        "self.documents[: rows.stop - rows.start]",
        "pp 2 ZBV; documents; offloaded",
    ),
    "labels across documents": (
        TextSource.__getitem__,
        "if self._splits_labels:",
        "if False:",
        "ddp 2; documents; half recomputed, accumulating, chunks",
    ),
    "rows to other experts": (
        expert._order_by_expert,
        "argsort(stable=True)",
        "argsort(descending=True)",
        "ep 4; experts; offloaded",
    ),
    "choices counted twice": (
        activation._choose_once,
        "keep_for_recomputation(lambda: choose(*scores_and_bias))",
        "choose(*scores_and_bias)",
        "one device; balanced; recomputed",
    ),
    "biases by local counts": (
        Balance.update,
        "dist.all_reduce(whole)",
        "pass",
        "fsdp 2; balanced; by operator, accumulating",
    ),
    "gate not summed": (
        tensor._local_product,
        "weight.to_local(grad_placements=[Partial()])",
        "weight.to_local()",
        "tp 2; experts; ",
    ),
    "largest logit not shared": (
        _Head._loss,
        "dist.all_reduce(largest_M, dist.ReduceOp.MAX, group=self.group)",
        "pass",
        "tp 2; Qwen3; recomputed",
    ),
}


@contextmanager
def planted(function: Callable[..., Any], right: str, wrong: str) -> Iterator[None]:
    """Replace the code of `function` in place, wherever it was imported."""
    target: Any = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(target))
    assert source.count(right) == 1, f"{target.__qualname__} must have {right!r} once"
    names = dict(target.__globals__)
    exec(f"from __future__ import annotations\n{source.replace(right, wrong)}", names)
    code, target.__code__ = target.__code__, inspect.unwrap(names[target.__name__]).__code__
    try:
        yield
    finally:
        target.__code__ = code


def train(job: list[str], mutant: str) -> pj.Trained:
    function, right, wrong, _ = MUTANTS[mutant]
    with planted(function, right, wrong):
        return pj.train(job)


@pytest.mark.promise("oracles-can-fail")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_one_device_shows_it(
    mutant: str,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    texts: Path,
    on_one_device: OneDevice,
) -> None:
    [(layout, model, how)] = [row for row in ROWS if "; ".join(row) == MUTANTS[mutant][-1]]
    where, options = LAYOUTS[layout], MODELS[model].options(texts)
    reference = on_one_device(pj.train, *options, evaluating=True)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *options, *where.options(how)]
    results = ranks.run(train, job, mutant, world=where.world)
    with pytest.raises(AssertionError):
        pj.assert_same_training(results, reference)
