"""Standard remedies for a job that needs too much memory, each planned once.

A remedy keeps the samples of a step and their results. It recomputes blocks, uses smaller batches
or smaller chunks of logits, offloads the optimizer's state, or shards over more ranks. The last one
within the same degrees combines all before it. Remedies that the rules forbid are not shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torchtitan.tools.plan.allocator import GIB
from torchtitan.tools.plan.candidates import LEAST_SEQUENCE
from torchtitan.tools.plan.job import Planned, send
from torchtitan.tools.plan.pool import open_pool, run_in
from torchtitan.tools.plan.tried import Tried, try_job

MANY_CHUNKS = 64
"""Chunks of the logits, if the trainer chooses their number, which is 16 at most."""
SHARD = {"parallelism.data_parallel_shard_degree": -1}


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Settings that may lower a job's memory."""

    settings: Mapping[str, object]
    world_size: int | None = None
    """Number of ranks. None: the job's."""

    def __str__(self) -> str:
        ranks = [] if self.world_size is None else [f"--world_size={self.world_size}"]
        options = [
            f"--{key}" if value is True else f"--{key}={value}"
            for key, value in self.settings.items()
        ]
        return " ".join([*ranks, *options])


def plan_remedies(planned: Planned, *, now: Tried) -> Iterator[str]:
    """Yield a table of memory and step time of the job with each remedy, and as it is (`now`)."""
    remedies = list(propose(planned))
    jobs = [
        send(planned.config, planned, settings=candidate.settings, world_size=candidate.world_size)
        for candidate in remedies
    ]
    yield (
        "\nRemedies, each planned by itself, as options to add to this command:\n"
        f"{'GiB':>6}{'step, s':>16}  fits  options\n"
    )
    with open_pool(len(jobs)) as pool:
        results = run_in(pool, try_job, jobs, names=[str(candidate) for candidate in remedies])
        for remedy, tried in zip(remedies, results, strict=True):
            if tried is not None:
                yield _line(planned, tried, str(remedy))
    yield _line(planned, now, "as it is")
    yield "`plan layout` searches all degrees, batches and ways of recomputation.\n"


def _line(planned: Planned, tried: Tried, options: str) -> str:
    fits = "yes" if tried.memory <= planned.device.memory else "no"
    seconds = f"{tried.time.best:.3g}-{tried.time.worst:.3g}"
    return f"{tried.memory / GIB:>6.1f}{seconds:>16}  {fits:<4}  {options}\n"


def propose(planned: Planned) -> Iterator[Remedy]:
    """Yield remedies for a job. The rules may forbid some."""
    local = list(_within_degrees(planned))
    for settings in local:
        yield Remedy(settings=settings)
    if len(local) > 1:
        yield Remedy(
            settings={
                key: value for settings_of_key in local for key, value in settings_of_key.items()
            }
        )

    dims, training = planned.layout.dims, planned.config.training
    samples = {"training.global_batch_size": planned.layout.samples_per_step(training)}
    degrees = {}
    if 2 * dims.tp <= planned.gpus_per_node:
        degrees["tensor_parallel"] = 2 * dims.tp
    if training.seq_len // (2 * dims.cp) >= LEAST_SEQUENCE:
        degrees["context_parallel"] = 2 * dims.cp
    if planned.layout.counts.num_experts:
        degrees["expert_parallel"] = 2 * dims.ep
    if dims.dp_replicate > 1:
        degrees["data_parallel_replicate"] = 1
    for axis, degree in degrees.items():
        yield Remedy(settings={f"parallelism.{axis}_degree": degree, **SHARD, **samples})
    yield Remedy(settings=SHARD, world_size=2 * planned.world_size)


def _within_degrees(planned: Planned) -> Iterator[Mapping[str, object]]:
    """Yield settings that keep the degrees."""
    config, training = planned.config, planned.config.training
    parallelism, validation = config.parallelism, config.validation
    samples = {"training.global_batch_size": planned.layout.samples_per_step(training)}
    if config.activation_checkpoint.mode != "full":
        yield {"activation_checkpoint.mode": "full"}
    size = training.local_batch_size
    if planned.layout.dims.pp == 1:
        if size > 1:
            yield {"training.local_batch_size": _smaller(size), **samples}
    elif (of_microbatch := parallelism.pipeline_parallel_microbatch_size) > 1:
        yield {"parallelism.pipeline_parallel_microbatch_size": _smaller(of_microbatch)}
    if validation.enable and (validated := validation.local_batch_size or size) > 1:
        yield {"validation.local_batch_size": _smaller(validated)}
    if parallelism.fsdp_reshard_after_forward == "never":
        yield {"parallelism.fsdp_reshard_after_forward": "always"}
    yield {"training.loss_chunks": 4 * training.loss_chunks or MANY_CHUNKS}
    if not training.enable_cpu_offload:
        yield {"training.enable_cpu_offload": True}


def _smaller(size: int) -> int:
    """Return the largest divisor of `size` that is at most half of it."""
    return next(n for n in range(size // 2, 0, -1) if size % n == 0)
