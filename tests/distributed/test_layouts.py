"""One model sharded and copied: a long run, shards that no rank has as much of as another.

Layouts and features together are in test_matrix.py. Here is the tiny model, with a vocabulary that
no degree divides, in float32, over 20 steps, with the global batch cut in different ways. Rounding
is all that may differ: what `torchtitan compare layouts` allows, whose comparison this is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from torchtitan.tools.compare.layouts.gaps import (
    WEIGHTS_TOLERANCE,
    compare_rows,
    compare_weights,
    first_unequal,
)
from torchtitan.tools.compare.layouts.words import parse_layout

LAYOUTS = {
    "fsdp 3 of 12 samples": "fsdp3 --training.global_batch_size=12",
    "hsdp 2x2, accumulating": "hsdp2x2 --training.local_batch_size=1",
    "one device, one microbatch": "single --training.local_batch_size=8",
}


def assert_same_training(result: jobs.Result, reference: jobs.Result) -> None:
    found = compare_rows(reference.rows, result.rows)
    assert not found.is_found, str(found)
    weights = compare_weights(reference.initial, reference.final, result.final)
    assert weights.largest <= WEIGHTS_TOLERANCE, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    parsed = parse_layout(LAYOUTS[layout])
    batch = f"--training.global_batch_size={12 if parsed.world_size == 3 else 8}"
    reference = on_one_device(jobs.train, batch, toml=jobs.TINY)
    job = [*jobs.write_job(tmp_path, cache=cache), jobs.UNSAVED, *parsed.arguments]
    result = ranks.run(jobs.train, job, world=parsed.world_size)[0]
    assert first_unequal(reference.initial, result.initial) == ""
    assert_same_training(result, reference)


def test_where_weights_are_kept_for_backward_changes_no_bit(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    finals = {}
    for kept in ("default", "always", "never", "2"):
        job = jobs.write_job(tmp_path, name=kept, cache=cache)
        job += [f"--parallelism.fsdp_reshard_after_forward={kept}", "--training.steps=2"]
        finals[kept] = ranks.run(jobs.train, [*job, jobs.UNSAVED], world=2)[0]
    for kept, result in finals.items():
        assert result.rows[-1]["loss"] == finals["default"].rows[-1]["loss"]
        assert first_unequal(finals["default"].final, result.final) == "", kept
