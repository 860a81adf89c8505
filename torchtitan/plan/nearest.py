"""Settings near those of a job that does not fit, with which it does, the quickest first.

What is tried leaves the samples of a step and what is computed of them as they are: blocks are
recomputed, the batch is taken in smaller parts, weights, sequences or products are shared by more
ranks, the logits are cut finer, or the optimizer's state lies with the host. Each change is
rehearsed by itself. If none is enough they are combined: of several changes the shares of memory
and time that each leaves are multiplied, which tells what is worth a rehearsal, and the rehearsal
decides.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from math import prod
from pathlib import Path

from torchtitan.base.device import GIB
from torchtitan.plan.candidates import LEAST_SEQUENCE, MODES, RECOMPUTES
from torchtitan.plan.job import Planned, Sent, send
from torchtitan.plan.limits import BUDGET_IS_NOT_TRIED
from torchtitan.plan.processes import open_pool
from torchtitan.plan.step import StepTime
from torchtitan.plan.tried import Tried, try_jobs

SHOWN, COMBINED = 3, 12
"""Settings to show, and the most combinations of changes that are rehearsed for it."""
MANY_CHUNKS = 64
"""Of the logits, where their number is left to the trainer, which takes 16 at most."""


@dataclass(frozen=True)
class Change:
    """Settings that may lower the memory of a job."""

    what: str
    """Changes of the same thing exclude one another."""
    settings: Mapping[str, object]

    def __str__(self) -> str:
        return " ".join(
            f"--{key}" if value is True else f"--{key}={value}"
            for key, value in self.settings.items()
        )


@dataclass(frozen=True)
class Found:
    """Changes, and the job that they make."""

    changes: tuple[Change, ...]
    tried: Tried

    @property
    def seconds(self) -> float:
        """The middle of the bounds."""
        return (self.tried.time.best + self.tried.time.worst) / 2


def describe_nearest(planned: Planned, *, now: Tried, budget: int, expandable: bool) -> str:
    """Return the nearest settings that need no more than `budget` bytes on each rank, as text.

    `expandable`: whether segments of the allocator can grow.
    """
    samples = planned.layout.samples_per_step(planned.config.training)
    has_budget = planned.has_budget
    changes = list(propose(planned))
    with tempfile.TemporaryDirectory() as folder, open_pool(len(changes)) as pool:
        file = Path(folder) / "job.toml"
        rehearse = partial(try_jobs, pool=pool, expandable=expandable)
        search = _Search(planned, file=file, samples=samples, rehearse=rehearse, budget=budget)
        found = search.run(changes, now=now)
        pool.terminate()
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    if not found:
        return (
            f"No settings near these need {budget / GIB:.1f} GiB or less: take more ranks, a "
            "device with more memory, or see what `layout` finds."
        )
    lines = [
        f"With these settings no rank needs more than {budget / GIB:.1f} GiB; the quickest first, "
        f"the {samples} samples of a step as they are:",
        f"{'GiB':>6}{'step, s':>16}",
        *(_line(one.tried.memory, one.tried.time, _said(one.changes, samples)) for one in found),
        _line(now.memory, now.time, "as it is, nothing recomputed" if has_budget else "as it is"),
    ]
    if has_budget:
        lines.append(BUDGET_IS_NOT_TRIED)
    return "\n".join(lines)


class _Search:
    def __init__(
        self,
        planned: Planned,
        *,
        file: Path,
        samples: int,
        rehearse: Callable[[Sequence[Sent]], Iterator[Tried | None]],
        budget: int,
    ) -> None:
        self._planned, self._file, self._samples = planned, file, samples
        self._rehearse, self._budget = rehearse, budget

    def run(self, changes: Sequence[Change], *, now: Tried) -> list[Found]:
        """Return the best that fit: single changes, or else the fewest that do together."""
        base = Found((), now)
        singles = list(self._try([(change,) for change in changes]))
        fitting = self._fitting(singles)
        if not fitting:
            helpful = [one for one in singles if one.tried.memory < now.memory]
            combined = sorted(
                _combine(base, helpful, budget=self._budget), key=lambda pair: pair[0]
            )
            for found in self._try([changes for _, changes in combined[:COMBINED]]):
                fitting += self._fitting([found])
                if len(fitting) == SHOWN:
                    break
        return sorted(fitting, key=lambda one: one.seconds)[:SHOWN]

    def _fitting(self, found: Sequence[Found]) -> list[Found]:
        return [one for one in found if one.tried.memory <= self._budget]

    def _try(self, work: Sequence[tuple[Change, ...]]) -> Iterator[Found]:
        jobs = [
            send(
                self._planned.config,
                self._planned,
                file=self._file,
                settings=_said(changes, self._samples).split(),
            )
            for changes in work
        ]
        for changes, tried in zip(work, self._rehearse(jobs), strict=True):
            if tried is not None:
                yield Found(changes, tried)


def _combine(
    base: Found, singles: Sequence[Found], *, budget: int
) -> Iterator[tuple[tuple[float, ...], tuple[Change, ...]]]:
    """Yield combinations that should fit, and before all others the most sparing, which might; each
    with what to sort it by: how many changes, and the time."""
    kinds: dict[str, list[Found]] = {}
    for one in singles:
        kinds.setdefault(one.changes[0].what, []).append(one)
    least: tuple[float, tuple[Change, ...]] | None = None
    for num in range(2, len(kinds) + 1):
        for group in combinations(kinds.values(), num):
            for chosen in product(*group):
                memory = base.tried.memory * prod(
                    one.tried.memory / base.tried.memory for one in chosen
                )
                seconds = prod(one.seconds / base.seconds for one in chosen)
                changes = tuple(one.changes[0] for one in chosen)
                if memory <= budget:
                    yield (num, seconds), changes
                if least is None or memory < least[0]:
                    least = memory, changes
    if least is not None and least[0] > budget:
        yield (0, 0.0), least[1]


def propose(planned: Planned) -> Iterator[Change]:
    """Yield changes that may lower the memory; the rules have not been asked yet."""
    config, dims = planned.config, planned.layout.dims
    training, parallelism = config.training, config.parallelism
    recomputation = config.activation_checkpoint
    option = recomputation.selective_ac_option
    # with a budget, too, nothing is recomputed in a rehearsal
    now = {"none": "none", "memory_budget": "none", "full": "full"}.get(recomputation.mode, option)
    first = RECOMPUTES.index(now) + 1 if now in RECOMPUTES else 2  # every third, say, as every 2nd
    for heavier in RECOMPUTES[first:]:
        settings: dict[str, object] = {"activation_checkpoint.mode": MODES[heavier]}
        if MODES[heavier] == "selective":
            settings["activation_checkpoint.selective_ac_option"] = heavier
        yield Change("recomputation", settings)

    local, validation = training.local_batch_size, config.validation
    batches = [("training", local)] if dims.pp == 1 else []
    if validation.enable:
        batches.append(("validation", validation.local_batch_size or local))
    for of, size in batches:
        for smaller in sorted({size // 2, 1} - {0, size}, reverse=True):
            yield Change(f"batch of {of}", {f"{of}.local_batch_size": smaller})
    num = parallelism.pipeline_parallel_num_microbatches
    size = parallelism.pipeline_parallel_microbatch_size
    if dims.pp > 1 and num is not None:
        yield Change("batch", {"parallelism.pipeline_parallel_num_microbatches": 2 * num})
    elif dims.pp > 1 and size > 1:
        yield Change("batch", {"parallelism.pipeline_parallel_microbatch_size": size // 2})

    prefix, has_experts = "parallelism", bool(planned.layout.counts.num_experts)
    degrees = {
        f"{prefix}.tensor_parallel_degree": [n * dims.tp for n in (2, 4)],
        f"{prefix}.context_parallel_degree": [
            n * dims.cp for n in (2,) if training.seq_len // (n * dims.cp) >= LEAST_SEQUENCE
        ],
        f"{prefix}.data_parallel_replicate_degree": [1] if dims.dp_replicate > 1 else [],
        f"{prefix}.expert_parallel_degree": [n * dims.ep for n in (2, 4) if has_experts],
    }
    for key, values in degrees.items():
        for value in values:
            if key.endswith("tensor_parallel_degree") and value > planned.gpus_per_node:
                continue
            yield Change(key, {key: value, f"{prefix}.data_parallel_shard_degree": -1})
    if parallelism.fsdp_reshard_after_forward == "never":
        yield Change("reshard", {f"{prefix}.fsdp_reshard_after_forward": "always"})
    chunks = 4 * training.loss_chunks or MANY_CHUNKS
    yield Change("chunks", {"training.loss_chunks": chunks})
    if not training.enable_cpu_offload:
        yield Change("offload", {"training.enable_cpu_offload": True})


def _said(changes: Sequence[Change], samples: int) -> str:
    """Return changes as options; the samples of a step have to be said where they would change."""
    settings: dict[str, object] = {}
    for change in changes:
        settings |= change.settings
    if any("degree" in key or "batch" in key for key in settings):
        settings["training.global_batch_size"] = samples
    return str(Change("all", settings))


def _line(memory: int, time: StepTime, said: str) -> str:
    return f"{memory / GIB:>6.1f}{f'{time.best:.3g}-{time.worst:.3g}':>16}  {said}"
