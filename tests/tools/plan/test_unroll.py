"""Unrolled equals full: a rehearsal of few blocks becomes that of all of them, event for event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, groupby
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

from tests.distributed.jobs import HSDP
from tests.distributed.pipeline_jobs import pipeline
from tests.tools.plan.jobs import placed
from torchtitan.models.interface import LanguageModel
from torchtitan.parallel.layout import Layout
from torchtitan.tools.plan import rehearse as rehearsing
from torchtitan.tools.plan.copies import CannotCopyError, Template, copy_blocks
from torchtitan.tools.plan.rehearse import find_templates, rehearse, rehearse_step
from torchtitan.tools.plan.tape import Entry, Record

TP2 = "--parallelism.tensor_parallel_degree=2"
EP2 = "--parallelism.expert_parallel_degree=2"
IN_4 = "--training.local_batch_size=4"
COPIED = "--parallelism.enable_sequence_parallel=false"
SELECTIVE = "--activation_checkpoint.mode=selective"
BY_OPERATOR = (SELECTIVE, "--activation_checkpoint.selective_ac_option=op")
EVERY_2 = (SELECTIVE, "--activation_checkpoint.selective_ac_option=2")
EXPERTS = ("--model.name=qwen3_moe", "--model.flavor=tiny")
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
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    # ranks, the one that is rehearsed
    "recomputed": (1, 0, (layers(8), "--activation_checkpoint.mode=full")),
    "documents": (1, 0, (layers(8), "--training.attn_mask_type=block_causal")),
    "hsdp, every 2": (4, 1, (layers(10), *HSDP, *EVERY_2)),
    "fsdp, kept": (4, 0, (layers(8), "--parallelism.fsdp_reshard_after_forward=never")),
    "fsdp, accumulating": (4, 3, (layers(8), "--training.global_batch_size=64")),
    "fsdp, offloaded": (4, 0, (layers(8), "--training.enable_cpu_offload=true")),
    "fsdp, adapters": (4, 0, (layers(8), "--lora.rank=4")),
    "fsdp x tp, stream copied": (4, 0, (layers(8), TP2, COPIED)),
    "cp ring": (4, 1, (layers(8), *cp("alltoall"))),
    "cp ulysses": (4, 0, (layers(8), *cp("ulysses"))),
    "pp, last rank": (2, 1, (layers(14), IN_4, *pipeline("1F1B"))),
    "pp Interleaved1F1B": (2, 0, (layers(28), IN_4, *pipeline("Interleaved1F1B"))),
    "experts dealt out, tp": (4, 0, (layers(8), *EXPERTS, EP2, TP2)),
    "deepseek_v3": (4, 0, (layers(10), *DEEPSEEK, EP2, *BY_OPERATOR)),
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_unrolled_equals_full(name: str, tmp_path: Path) -> None:
    world, rank, arguments = LAYOUTS[name]
    config, layout = placed(tmp_path, *arguments, world=world)
    templates, skipped = find_templates(config, layout=layout, rank=rank)
    assert skipped
    few = rehearse(config, layout=layout, rank=rank, skipped=skipped)
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


@pytest.fixture(name="few", scope="module")
def _few(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, list[Template]]:
    config, layout = placed(tmp_path_factory.mktemp("job"), layers(10), world=2)
    templates, skipped = find_templates(config, layout=layout, rank=0)
    return rehearse(config, layout=layout, rank=0, skipped=skipped), templates


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


@pytest.mark.parametrize("block", [3, 8])
def test_a_block_that_is_unlike_the_others(block: int, tmp_path: Path) -> None:
    config, layout = placed(tmp_path, layers(12))
    layout = widened(layout, block=block)
    found = rehearse_step(config, layout=layout, rank=0)
    assert_like(found, rehearse(config, layout=layout, rank=0))


def test_all_blocks_are_run_where_copying_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where blocks look alike and are not: with settings that no parameter shows."""
    config, layout = placed(tmp_path, layers(12))
    layout = widened(layout, block=2)
    monkeypatch.setattr(rehearsing, "_kinds", lambda _: [0] * 12)
    [template], _ = find_templates(config, layout=layout, rank=0)
    assert template.blocks[template.first] == 2
    found = rehearse_step(config, layout=layout, rank=0)
    assert found.entries == rehearse(config, layout=layout, rank=0).entries


def test_frozen_blocks_are_unlike_trained_ones(tmp_path: Path) -> None:
    frozen = '--optimizer.frozen_params=["layers.0.*", "layers.1.*", "layers.2.*"]'
    config, layout = placed(tmp_path, layers(14), frozen)
    [template], _ = find_templates(config, layout=layout, rank=0)
    assert template.first == 3 + rehearsing.MARGIN
    found = rehearse_step(config, layout=layout, rank=0)
    assert_like(found, rehearse(config, layout=layout, rank=0))


def test_dense_blocks_before_experts_are_no_templates(tmp_path: Path) -> None:
    config, layout = placed(tmp_path, layers(12), *DEEPSEEK)
    [template], skipped = find_templates(config, layout=layout, rank=0)
    assert min(skipped) > 1 + rehearsing.MARGIN  # the first is dense
    few = rehearse(config, layout=layout, rank=0, skipped=skipped)
    wrong = Template(blocks=template.blocks, first=0, period=1, times=template.times)
    with pytest.raises(CannotCopyError):  # as if all were alike
        copy_blocks(few, [wrong])
