"""The job that is rehearsed: a step of fewer microbatches with the same peak of memory.

Once a pipeline is full, each microbatch repeats the one before it. So does each accumulation step
after the second, which finds the gradients of the first. A rehearsal runs as few as reach the peak,
and counts are multiplied: computation by the ratio of microbatches, communication that happens once
per pass of the pipeline by the ratio of passes.

Blocks are not compiled, and "auto" precision is bfloat16, as on each device of the table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from torchtitan.base.errors import ConfigError
from torchtitan.job import Config
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.pipeline.layout import PipelineLayout
from torchtitan.parallel.pipeline.schedules import (
    SCHEDULES,
    Kind,
    Table,
    check_schedule,
    compute_table,
    count_microbatches,
)
from torchtitan.tools.plan.links import OVERLAPPED
from torchtitan.tools.plan.tape import Entry, Phase

HELD: Mapping[Kind, int] = {
    "forward": 1,
    "backward": -1,
    "backward_input": 0,
    "backward_weight": -1,
}
"""Change of the number of activations that a rank holds, each of one stage and microbatch."""


@dataclass(frozen=True, kw_only=True)
class Shortened:
    """A job whose step has fewer microbatches."""

    config: Config
    layout: Layout
    microbatches: float = 1.0
    """Microbatches of the full step, per rehearsed microbatch."""
    passes: float = 1.0
    """Accumulation steps of the full step, per rehearsed one."""

    def times(self, entry: Entry, phase: Phase | None) -> float:
        """Return how many times the full step has an entry of the record."""
        if phase == "validation":
            return 0.0
        if phase in ("update", "state"):
            return 1.0
        is_once = phase in (None, "between") and entry.what == "message"
        if self.layout.pipeline is not None and is_once and entry.where[0] in OVERLAPPED:
            return self.passes
        return self.microbatches


def shorten(config: Config, layout: Layout) -> Shortened:
    """Return the job with the fewest microbatches and accumulation steps that show a full step."""
    training = config.training
    if training.mixed_precision_param == "auto":
        training = replace(training, mixed_precision_param="bfloat16")
    config = replace(config, training=training, compile=replace(config.compile, enable=False))
    accumulation = min(layout.accumulation, 2)
    passes = layout.accumulation / accumulation
    layout = replace(layout, accumulation=accumulation)
    pipeline = layout.pipeline
    short_table = None if pipeline is None else _shorten_table(config, pipeline)
    if short_table is None or pipeline is None:
        return Shortened(config=config, layout=layout, microbatches=passes, passes=passes)
    table, num, of = short_table
    validation = replace(  # keeps all microbatches: a rank holds some memory of each
        config.validation,
        local_batch_size=config.validation.local_batch_size or training.local_batch_size,
    )
    training = replace(
        training, local_batch_size=num * pipeline.microbatch_size, global_batch_size=-1
    )
    return Shortened(
        config=replace(config, training=training, validation=validation),
        layout=replace(layout, pipeline=replace(pipeline, table=table)),
        microbatches=passes * of / num,
        passes=passes,
    )


def _shorten_table(config: Config, pipeline: PipelineLayout) -> tuple[Table, int, int] | None:
    """Return the schedule with the fewest microbatches that fill it, and both numbers."""
    settings = config.parallelism
    pp, num = len(pipeline.table), count_microbatches(pipeline.table)
    stages_per_rank = len(pipeline.modules) // pp
    peaks = _peaks(pipeline.table)
    name = settings.pipeline_parallel_schedule
    sizes = {"pp": pp, "stages_per_rank": stages_per_rank}

    def is_allowed(fewer: int) -> bool:
        try:
            check_schedule(name, num_microbatches=fewer, **sizes)
        except ConfigError:
            return False
        return True

    def is_full(fewer: int) -> bool:
        return _peaks(compute_table(name, num_microbatches=fewer, **sizes)) == peaks

    # fewer cannot fill it
    allowed = [n for n in range(max(1, max(peaks) // stages_per_rank), num) if is_allowed(n)]
    if not SCHEDULES[name].in_rounds:  # more microbatches never have a lower peak
        allowed = allowed[bisect_left(allowed, True, key=is_full) :]
    full = next((index for index, fewer in enumerate(allowed) if is_full(fewer)), num)
    if full + 1 >= len(allowed):
        return None
    fewer = allowed[full + 1]  # finds what the first ones have left
    return compute_table(name, num_microbatches=fewer, **sizes), fewer, num


def _peaks(table: Table) -> list[int]:
    """Return the most activations that each rank holds at once, as `Timeline.peak` does."""
    return [max(accumulate(HELD[action.kind] for action in row)) for row in table]


def fullest_ranks(pipeline: PipelineLayout) -> list[int]:
    """Return the ranks that may need most memory: the first, the last, and of the ranks between
    them the one with most activations at its peak and the one with most modules."""
    sizes = [len(modules) for modules in pipeline.modules]
    held = [max(accumulate(HELD[a.kind] * sizes[a.stage] for a in row)) for row in pipeline.table]
    own = [sum(sizes[stage] for stage in pipeline.stages_of(n)) for n in range(len(held))]
    last = len(held) - 1
    inner = range(1, last) or range(1)
    fullest = (
        max(inner, key=lambda n: (held[n], own[n])),
        max(inner, key=lambda n: (own[n], held[n])),
    )
    return sorted({0, *fullest, last})
