"""Documents that lie together in a sequence train as if each were alone, in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY8, UNSAVED, pipeline
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.optim.loss import IGNORE_INDEX
from torchtitan.parallel.context.layout import SequenceLayout
from torchtitan.parallel.context.shard import SequenceShard

T = TypeVar("T")
TP2 = "--parallelism.tensor_parallel_degree=2"
PP2 = pipeline("1F1B")


def cp2(method: str, balancer: str) -> tuple[str, ...]:
    return (
        "--parallelism.context_parallel_degree=2",
        f"--parallelism.context_parallel_rotate_method={method}",
        f"--parallelism.context_parallel_load_balancer={balancer}",
    )


# --- each document by itself

# two sequences of 64 tokens: a boundary in the middle of a chunk, single tokens, a document longer
# than a rank's part
LENGTHS = ((11, 1, 52), (37, 27))
POSITIONS: list[bool] = [False, True]
ALONE = {
    "one device": (1, ()),
    # each rank holds one half: all labels of one of them are masked for most documents
    "cp 2, allgather, contiguous": (2, cp2("allgather", "none")),
    "cp 2, ring, balanced": (2, cp2("ring", "balanced")),
    "cp 2, ulysses": (2, cp2("ulysses", "headtail")),
    "pp 2": (2, PP2),
    "tp 2": (2, (TP2,)),
}


@dataclass(frozen=True)
class Figures:
    """Of one document: its summed loss, or a rank's part of it, and gradients."""

    loss: float
    gradients: dict[str, Tensor]


def tokens() -> Tensor:
    return torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(5))


def documents() -> Iterator[tuple[int, int, int]]:
    """Sequence, begin and end of each."""
    for row, lengths in enumerate(LENGTHS):
        for start, stop in pairwise(accumulate(lengths, initial=0)):
            yield row, start, stop


def labels_of(row: int, start: int, stop: int) -> Tensor:
    """Those of one document, the last token's not, and no others."""
    labels = torch.full((2, 64), IGNORE_INDEX)
    labels[row, start : stop - 1] = tokens()[row, start + 1 : stop]
    return labels


def alone() -> dict[str, list[Figures]]:
    """Each document in a batch of its own, on one device, by kind of positions."""
    spec, found = MODELS["llama3"], {}
    for kind in POSITIONS:
        found[kind] = []
        for row, start, stop in documents():
            with pj.strong_weights():
                model = spec.build(replace(spec.flavors["tiny8"], num_layers=2))
                initialize(model, seed=0)
            model.output.loss = lambda x, weight, labels: torch.nn.functional.cross_entropy(
                (x @ weight.T).flatten(0, 1), labels.flatten(), reduction="sum"
            )
            first = start if not kind else 0
            part = slice(row, row + 1), slice(start, stop)
            loss = model(
                tokens()[part],
                torch.arange(first, first + stop - start),
                labels=labels_of(row, start, stop)[part],
            )
            loss.backward()
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found[kind].append(Figures(loss.item(), gradients))
    return found


def packed(job: list[str]) -> dict[str, list[Figures]]:
    """The loss and the gradients of each document in the batch of all, on this rank."""
    with pj.strong_weights():
        run = jobs.start(job)
    parallelism = jobs.load_config(job).parallelism
    found: dict[str, list[Figures]] = {}
    for kind in POSITIONS:
        shard = SequenceShard(
            SequenceLayout.from_config(parallelism),
            rank=run.mesh.data.get_local_rank("cp"),
            attn_mask_type="block_causal",
            reset_positions=kind,
        )
        found[kind] = []
        lengths = torch.tensor([n for row in LENGTHS for n in row])
        for place in documents():
            samples = {"tokens": tokens(), "labels": labels_of(*place), "document_lengths": lengths}
            loss = run.execution.forward_backward([shard.take(samples)], divisor=torch.tensor(1.0))
            gradients = {
                name: jobs.full(torch.zeros_like(p) if p.grad is None else p.grad)
                for name, p in run.model.named_parameters()
            }
            run.optimizer.zero_grad()
            owns = run.execution.owns_loss and run.mesh.params.get_local_rank("tp") == 0
            total = loss * owns
            dist.all_reduce(total)
            found[kind].append(Figures(total.item(), gradients))
    return found


@pytest.fixture(scope="module")
def each_alone() -> dict[str, list[Figures]]:
    return alone()


@pytest.mark.promise("documents")
@pytest.mark.slow
@pytest.mark.parametrize("layout", ALONE)
def test_as_if_each_document_were_alone(
    layout: str,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    each_alone: dict[str, list[Figures]],
) -> None:
    """Losses to 1e-5, and so is the gradient; no label at all (a single token) makes both 0."""
    world, overrides = ALONE[layout]
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *overrides, "--training.seq_len=64"]
    job += ["--model.num_layers=2"]
    job += ["--training.local_batch_size=2", "--training.global_batch_size=-1"]
    results = ranks.run(packed, job, world=world)
    for kind in POSITIONS:
        for number, expected in enumerate(each_alone[kind]):
            ours = [result[kind][number] for result in results]
            assert ours[0].loss == pytest.approx(expected.loss, rel=1e-5)
            gradients = {name: g for part in ours for name, g in part.gradients.items()}
            assert gradients.keys() == expected.gradients.keys()
            for name, gradient in gradients.items():
                wanted = expected.gradients[name]
                assert (gradient - wanted).norm() <= 1e-4 * wanted.norm(), name
    losses = {kind: [figures.loss for figures in each_alone[kind]] for kind in POSITIONS}
    assert losses[True] == pytest.approx(losses[False], rel=1e-4)  # RoPE is relative
    assert 0 in losses[True]


# --- what the settings mean; what whole jobs train with them is in test_matrix.py


@pytest.fixture
def arguments(texts: Path) -> list[str]:
    return [
        "--training.dataset=files",
        f"--training.dataset_path={texts}",
        "--training.seq_len=64",
        "--training.attn_mask_type=block_causal",
        "--training.reset_positions=true",
        UNSAVED,
    ]


def first_steps(arguments: list[list[str]]) -> list[dict[str, float]]:
    return [pj.train(job).rows[0] for job in arguments]


@pytest.mark.promise("documents")
def test_the_two_settings_are_independent(
    ranks: RankPool, tmp_path: Path, cache: Path, arguments: list[str]
) -> None:
    """Positions matter across documents alone; what is attended to, and is labelled, always."""
    four = [(a, p) for a in ("causal", "block_causal") for p in (False, True)]
    given = [
        [
            *jobs.write_job(tmp_path, TINY8, name=f"{attention}_{positions}", cache=cache),
            *arguments,
            "--training.steps=1",
            f"--training.attn_mask_type={attention}",
            f"--training.reset_positions={positions}",
        ]
        for attention, positions in four
    ]
    [rows] = ranks.run(first_steps, given, world=1)
    across, across_restarted, within, within_restarted = (row["loss"] for row in rows)
    assert within_restarted == pytest.approx(within, rel=1e-5)
    assert across_restarted != pytest.approx(across, rel=1e-4)
    assert within != pytest.approx(across, rel=1e-4)
    fractions = [row["valid_token_fraction"] for row in rows]
    assert fractions[0] == fractions[1] == 1
    assert fractions[2] == fractions[3] < 1
