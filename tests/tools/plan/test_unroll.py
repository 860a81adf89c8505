"""Unrolled equals full: a rehearsal of few blocks becomes that of all of them, event for event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from tests.jobs import HSDP, pipeline
from tests.tools.plan.jobs import placed
from torchtitan.job import Config
from torchtitan.models.interface import LanguageModel
from torchtitan.parallel.layout import Layout
from torchtitan.tools.plan import rehearse as rehearsing
from torchtitan.tools.plan.copies import CannotCopyError, Template, copy_blocks
from torchtitan.tools.plan.rehearse import find_templates, rehearse, rehearse_step
from torchtitan.tools.plan.tape import Entry, Record

pytestmark = pytest.mark.slow

TP2 = "--parallelism.tensor_parallel_degree=2"
EP2 = "--parallelism.expert_parallel_degree=2"
IN_2 = "--training.local_batch_size=2"
FROZEN = '--optimizer.frozen_params=["layers.0.*"]'
FULL = "--activation_checkpoint.mode=full"
COPIED = "--parallelism.enable_sequence_parallel=false"
SELECTIVE = "--activation_checkpoint.mode=selective"
BY_OPERATOR = (SELECTIVE, "--activation_checkpoint.selective_ac_option=op")
EVERY_2 = (SELECTIVE, "--activation_checkpoint.selective_ac_option=2")
DEEPSEEK = ("--model.name=deepseek_v3", "--model.flavor=tiny")


def layers(num: int) -> str:
    return f"--model.num_layers={num}"


def cp(method: str) -> tuple[str, ...]:
    return (
        "--parallelism.context_parallel_degree=2",
        f"--parallelism.context_parallel_rotate_method={method}",
    )


FREES_SENT_LATER = TorchVersion(torch.__version__) >= (2, 15)
"""A pipeline frees what it sent in whichever block runs then, so all blocks are rehearsed."""
BEHIND_FROZEN = "cp ring, recomputed, frozen"
BEHIND_DENSE = "deepseek_v3, experts dealt out, tp, cp ulysses"
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    # ranks, the one that is rehearsed, and as few layers as leave some to skip
    "hsdp, every 2, offloaded, documents": (
        4,
        1,
        (
            *(layers(10), *HSDP, *EVERY_2, "--training.enable_cpu_offload=true"),
            "--training.attn_mask_type=block_causal",
        ),
    ),
    "fsdp, kept, accumulating, adapters": (
        4,
        3,
        (
            *(layers(7), "--parallelism.fsdp_reshard_after_forward=never"),
            *("--training.global_batch_size=64", "--lora.rank=4"),
        ),
    ),
    "fsdp x tp, stream copied": (4, 0, (layers(7), TP2, COPIED)),
    BEHIND_FROZEN: (2, 1, (layers(9), *cp("alltoall"), FULL, FROZEN)),
    "pp Interleaved1F1B, last rank": (2, 1, (layers(28), IN_2, *pipeline("Interleaved1F1B"))),
    BEHIND_DENSE: (
        8,
        0,
        (layers(8), *DEEPSEEK, EP2, TP2, *cp("ulysses"), *BY_OPERATOR),
    ),
}


def of_phase(record: Record, *, is_update: bool) -> list[Entry]:
    entries = settled(record)
    return [
        entry
        for piece, end in record.bounds()
        if (piece.phase == "update") == is_update
        for entry in entries[piece.start : end]
    ]


def totals(entries: list[Entry]) -> Counter[str]:
    """Return bytes and operations by what happens."""
    found: Counter[str] = Counter()
    for entry in entries:
        found[entry.what] += entry.size
    return found


def settled(record: Record) -> list[Entry]:
    """Sort consecutive deaths by birth, because their order does not matter."""
    runs = groupby(record.entries, key=lambda entry: entry.what == "death")
    return [
        entry
        for are_deaths, run in runs
        for entry in (sorted(run, key=lambda entry: entry.born) if are_deaths else run)
    ]


def peak(record: Record) -> int:
    signs = {"birth": 1, "death": -1}
    return max(accumulate(signs.get(e.what, 0) * e.size for e in record.entries))


def assert_like(unrolled: Record, full: Record) -> None:
    """Assert that two records are the same up to the update, and its totals nearly so: it works on
    all parameters at once, and what it does is scaled, scratch of a few KiB too, which does
    not grow."""
    assert of_phase(unrolled, is_update=False) == of_phase(full, is_update=False)
    assert unrolled.pieces == full.pieces
    assert peak(unrolled) == pytest.approx(peak(full), rel=0.01)
    ours, right = (totals(of_phase(r, is_update=True)) for r in (unrolled, full))
    for scratch in ("birth", "death"):
        assert abs(ours.pop(scratch) - right.pop(scratch)) < 8192
    assert ours == pytest.approx(right, rel=0.02)


@cache
def few_of(name: str) -> tuple[Record, list[Template]]:
    """Return the record without the blocks that are skipped, and the templates of these."""
    world, rank, arguments = LAYOUTS[name]
    with TemporaryDirectory() as folder:
        config, layout = placed(Path(folder), *arguments, world=world)
    templates, skipped = find_templates(config, layout=layout, rank=rank)
    assert skipped
    return rehearse(config, layout=layout, rank=rank, skipped=skipped), templates


@pytest.mark.promise("plan-real")
@pytest.mark.parametrize("name", LAYOUTS)
def test_unrolled_equals_full(name: str, tmp_path: Path) -> None:
    world, rank, arguments = LAYOUTS[name]
    config, layout = placed(tmp_path, *arguments, world=world)
    few, templates = few_of(name)
    full = rehearse(config, layout=layout, rank=rank)
    assert len(few.entries) < len(full.entries)
    if name.startswith("pp") and FREES_SENT_LATER:
        with pytest.raises(CannotCopyError):
            copy_blocks(few, templates)
        found = rehearse_step(config, layout=layout, rank=rank)
        assert found.entries == full.entries
    else:
        assert_like(copy_blocks(few, templates), full)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "DualPipeV"])
def test_halves_of_backwards_are_not_unrolled(schedule: str, tmp_path: Path) -> None:
    config, layout = placed(tmp_path, layers(36), *pipeline(schedule), world=2)
    assert find_templates(config, layout=layout, rank=0) == ([], set())


@pytest.fixture
def few() -> tuple[Record, list[Template]]:
    return few_of("fsdp x tp, stream copied")


def changed(record: Record, index: int, **fields: object) -> Record:
    entries = list(record.entries)
    entries[index] = entries[index]._replace(**fields)  # type: ignore[arg-type]
    return Record(entries, record.pieces)


def of_block(record: Record, block: int, phase: str, what: str) -> Iterator[int]:
    """Yield the indices of a block's entries."""
    for piece, end in record.bounds():
        if (piece.block, piece.phase) == (block, phase):
            yield from (i for i in range(piece.start, end) if record.entries[i].what == what)


@pytest.mark.parametrize("behind", [0, 1], ids=["the template", "the block behind"])
@pytest.mark.parametrize("phase", ["forward", "backward", "state"])
def test_other_work_in_one_block_is_seen(
    few: tuple[Record, list[Template]], behind: int, phase: str
) -> None:
    record, templates = few
    [template] = templates
    number = template.blocks[template.first + behind]
    index = next(of_block(record, number, phase, "birth"))
    entry = record.entries[index]
    with pytest.raises(CannotCopyError):
        copy_blocks(changed(record, index, size=entry.size + 512), templates)


def test_a_death_of_something_else_is_seen(few: tuple[Record, list[Template]]) -> None:
    record, templates = few
    deaths = list(of_block(record, templates[0].blocks[templates[0].first], "backward", "death"))
    # the same storage dies twice, and another one never
    first, second = deaths[:2]
    with pytest.raises(CannotCopyError):
        copy_blocks(changed(record, second, born=record.entries[first].born), templates)


def widened(layout: Layout, *, block: int) -> Layout:
    """Return a layout with a wider feed-forward in one block, of which no setting tells."""
    before: Callable[[LanguageModel], None] | None = layout.adapt

    def adapt(model: LanguageModel) -> None:
        if before is not None:
            before(model)
        if str(block) in model.layers:
            part = model.layers[str(block)].feed_forward
            with part.w1.weight.device:
                for name, (rows, columns) in {
                    "w1": (192, 32),
                    "w2": (32, 192),
                    "w3": (192, 32),
                }.items():
                    setattr(part, name, nn.Linear(columns, rows, bias=False))

    return replace(layout, adapt=adapt)


@pytest.mark.parametrize(("block", "first"), [(1, 2 + rehearsing.MARGIN), (5, None)])
def test_a_block_that_is_unlike_the_others(block: int, first: int | None, tmp_path: Path) -> None:
    config, layout = placed(tmp_path, layers(9))
    templates, _ = find_templates(config, layout=widened(layout, block=block), rank=0)
    assert [one.first for one in templates] == ([] if first is None else [first])


def test_all_blocks_are_run_where_copying_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where blocks look alike and are not: with settings that no parameter shows."""
    config, layout = placed(tmp_path, layers(7))
    layout = widened(layout, block=2)
    monkeypatch.setattr(rehearsing, "_kinds", lambda _: [0] * 7)
    runs: list[tuple[int, Record]] = []

    def run(config: Config, *, skipped: Collection[int] = (), **settings: Any) -> Record:
        record = rehearse(config, skipped=skipped, **settings)
        runs.append((len(skipped), record))
        return record

    monkeypatch.setattr(rehearsing, "rehearse", run)
    found = rehearse_step(config, layout=layout, rank=0)
    assert [num for num, _ in runs] == [1, 0]
    assert found is runs[-1][1]


def test_blocks_unlike_the_first_ones_are_templates() -> None:
    """Behind a frozen block, and behind a dense one before experts."""
    for name in (BEHIND_FROZEN, BEHIND_DENSE):
        few, [template] = few_of(name)
        assert template.first == 1 + rehearsing.MARGIN
    wrong = Template(blocks=template.blocks, first=0, period=1, times=template.times)
    with pytest.raises(CannotCopyError):  # as if all were alike
        copy_blocks(few, [wrong])
