"""A rehearsal of few microbatches becomes that of all of them, event for event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.pipeline_jobs import pipeline
from tests.tools.plan.jobs import placed
from tests.tools.plan.test_unroll import (
    EP2,
    EXPERTS,
    FREES_SENT_LATER,
    SELECTIVE,
    TP2,
    assert_like,
    layers,
    peak,
    settled,
)
from torchtitan.parallel.pipeline.schedules import Action, count_microbatches
from torchtitan.tools.plan import copies
from torchtitan.tools.plan import rehearse as rehearsing
from torchtitan.tools.plan.copies import (
    CannotCopyError,
    FewMicrobatches,
    copy_microbatches,
    skip_microbatches,
)
from torchtitan.tools.plan.rehearse import (
    find_templates,
    rehearse,
    rehearse_microbatches,
    rehearse_step,
)
from torchtitan.tools.plan.tape import Record

FULL = "--activation_checkpoint.mode=full"
TWICE = "--training.global_batch_size=28"

LAYOUTS: dict[str, tuple[str, int, int, int, int, tuple[str, ...]]] = {
    # schedule, pipeline ranks, all ranks, the one that is rehearsed, microbatches, settings
    "1F1B, first": ("1F1B", 2, 2, 0, 7, ()),
    "1F1B, last, fsdp": ("1F1B", 2, 4, 2, 7, ()),
    "1F1B, in between": ("1F1B", 4, 4, 1, 9, ()),
    "1F1B, accumulating": ("1F1B", 2, 4, 0, 7, (TWICE,)),
    "1F1B, tp, recomputed": ("1F1B", 2, 4, 2, 7, (TP2, FULL)),
    "1F1B, experts dealt out, by operator": ("1F1B", 2, 4, 2, 7, (*EXPERTS, EP2, SELECTIVE)),
    "GPipe": ("GPipe", 2, 2, 0, 7, ()),
    "Interleaved1F1B": ("Interleaved1F1B", 2, 2, 1, 8, (layers(8),)),
    "Interleaved1F1B, tp, accumulating": (
        "Interleaved1F1B",
        2,
        4,
        0,
        8,
        (layers(8), TP2, "--training.global_batch_size=16"),
    ),
    "LoopedBFS": ("LoopedBFS", 2, 2, 1, 7, (layers(8),)),
    "InterleavedZeroBubble, first": ("InterleavedZeroBubble", 2, 2, 0, 8, (layers(8),)),
    "ZBVZeroBubble, first": ("ZBVZeroBubble", 2, 2, 0, 9, (layers(8),)),
    "ZBVZeroBubble, last": ("ZBVZeroBubble", 2, 2, 1, 9, (layers(8),)),
    "ZBVZeroBubble, in between": ("ZBVZeroBubble", 4, 4, 2, 19, (layers(8),)),
    "ZBVZeroBubble, experts": ("ZBVZeroBubble", 2, 2, 1, 9, (*EXPERTS, layers(4))),
    "DualPipeV, first": ("DualPipeV", 2, 2, 0, 12, (layers(8),)),
    "DualPipeV, last, tp": ("DualPipeV", 2, 4, 2, 12, (layers(8), TP2)),
}
QUICK = ("1F1B, first", "1F1B, last, fsdp", "GPipe", "LoopedBFS", "ZBVZeroBubble, last")
IN_ANY_ORDER = ("ZBVZeroBubble, experts",)
"""Several weights of an expert's layer hang on the same gradients, which torch keeps in sets (in
pipelining/_backward.py): they are taken in the order of addresses, another in each rehearsal."""


def runs(folder: Path, name: str) -> tuple[Record, FewMicrobatches, Record]:
    """Return the record of few microbatches, and that of all of them."""
    schedule, pp, world, rank, num, arguments = LAYOUTS[name]
    size = f"--training.local_batch_size={num}"
    config, layout = placed(folder, size, *pipeline(schedule, pp=pp), *arguments, world=world)
    assert layout.pipeline is not None
    sparse = skip_microbatches(layout.pipeline, rank=rank * pp // world)
    assert sparse is not None
    assert count_microbatches(sparse.pipeline.table) < num
    few = rehearse(config, layout=replace(layout, pipeline=sparse.pipeline), rank=rank)
    return few, sparse, rehearse(config, layout=layout, rank=rank)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS],
)
def test_few_microbatches_become_all(name: str, tmp_path: Path) -> None:
    few, sparse, full = runs(tmp_path, name)
    assert len(few.entries) < len(full.entries)
    found = copy_microbatches(few, sparse)
    if name in IN_ANY_ORDER:
        assert sorted(entry[:5] for entry in found.entries) == sorted(
            entry[:5] for entry in full.entries
        )
        assert peak(found) == pytest.approx(peak(full), rel=0.01)
        return
    assert settled(found) == settled(full)
    assert found.pieces == full.pieces


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
@pytest.mark.long
def test_blocks_and_microbatches_are_skipped_together(schedule: str, tmp_path: Path) -> None:
    size = "--training.local_batch_size=6"
    config, layout = placed(tmp_path, layers(28), size, *pipeline(schedule), world=2)
    assert find_templates(config, layout=layout, rank=1)[1]
    assert layout.pipeline is not None
    assert skip_microbatches(layout.pipeline, rank=1) is not None
    found = rehearse_step(config, layout=layout, rank=1)
    assert_like(found, rehearse(config, layout=layout, rank=1))


def test_gradients_that_wait_for_every_second_one_are_not_copied(tmp_path: Path) -> None:
    """Here the halves of two microbatches take turns: none does what the next one does."""
    job = ("--training.local_batch_size=8", layers(8), *pipeline("InterleavedZeroBubble"))
    _, layout = placed(tmp_path, *job, world=2)
    assert layout.pipeline is not None
    assert skip_microbatches(layout.pipeline, rank=1) is None


@pytest.fixture(name="few", scope="module")
def _few(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, FewMicrobatches]:
    few, sparse, _ = runs(tmp_path_factory.mktemp("job"), "1F1B, first")
    return few, sparse


def of_action(record: Record, name: str, what: str) -> Iterator[int]:
    """Yield the indices of an action's entries."""
    ends = [action.start for action in record.actions[1:]] + [len(record.entries)]
    for action, end in zip(record.actions, ends, strict=True):
        if action.name == name:
            yield from (i for i in range(action.start, end) if record.entries[i].what == what)


def altered(record: Record, index: int, **fields: object) -> Record:
    entries = list(record.entries)
    entries[index] = entries[index]._replace(**fields)  # type: ignore[arg-type]
    return replace(record, entries=entries)


@pytest.mark.parametrize("name", ["0F1", "0F2", "0B1", "0B2", "0SEND_F2"])
def test_other_work_for_one_microbatch_is_seen(
    few: tuple[Record, FewMicrobatches], name: str
) -> None:
    record, sparse = few
    what = "message" if "SEND" in name else "pass"
    index = next(of_action(record, name, what))
    other = altered(record, index, size=record.entries[index].size + 512)
    with pytest.raises(CannotCopyError):
        copy_microbatches(other, sparse)


def test_a_death_of_something_else_is_seen(few: tuple[Record, FewMicrobatches]) -> None:
    record, sparse = few
    # in all copies alike the same storage dies twice, and another one never
    for name in ("0B1", "0B2"):
        first, second = list(of_action(record, name, "death"))[:2]
        dead = record.entries[first]
        record = altered(record, second, **dead._asdict())
    with pytest.raises(CannotCopyError):
        copy_microbatches(record, sparse)


def test_actions_in_another_order_are_seen(few: tuple[Record, FewMicrobatches]) -> None:
    record, sparse = few
    wrong: Sequence[str] = [*sparse.run_actions[1:], sparse.run_actions[0]]
    with pytest.raises(CannotCopyError):
        copy_microbatches(record, replace(sparse, run_actions=wrong))


@pytest.mark.long
def test_all_are_run_where_copying_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if what comes before a half of backward did not matter."""
    job = ("--training.local_batch_size=9", layers(8), *pipeline("ZBVZeroBubble"))
    config, layout = placed(tmp_path, *job, world=2)

    def works(row: Sequence[Action]) -> dict[int, set[object]]:
        return {action.microbatch: {0} for action in row}

    monkeypatch.setattr(copies, "_works", works)
    failed = []
    plain = rehearsing.copy_microbatches

    def unrolling(record: Record, sparse: FewMicrobatches) -> Record:
        try:
            return plain(record, sparse)
        except CannotCopyError as error:
            failed.append(error)
            raise

    monkeypatch.setattr(rehearsing, "copy_microbatches", unrolling)
    found = rehearse_microbatches(config, layout=layout, rank=1)
    assert failed or FREES_SENT_LATER  # then nothing of another microbatch is freed in a half
    assert settled(found) == settled(rehearse(config, layout=layout, rank=1))
