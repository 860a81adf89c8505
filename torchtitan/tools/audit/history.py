"""Which samples each step of a run consumed, from its checkpoints and settings.

The position in the data is one number, and a step adds the global batch to it. A start may change
the batch and the layout. Each checkpoint holds its position, and the settings and layout of the
start that saved it, so the steps up to a checkpoint are counted back from it; those after the last
one, or of a run without any, are counted on by `config.toml`. Nothing but small JSON files is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from torchtitan.base.errors import CheckpointError, ConfigError, DataError
from torchtitan.base.stored_json import read_json
from torchtitan.base.urls import is_url
from torchtitan.checkpoint.checksums import MANIFEST
from torchtitan.checkpoint.start import stored_layout
from torchtitan.checkpoint.storage import STATE, find_steps
from torchtitan.data.loader import accumulation_steps
from torchtitan.data.sampler import SkippedSamples
from torchtitan.data.settings import DEFAULT_CACHE
from torchtitan.job import CONFIG_FILE, Config
from torchtitan.mesh.dims import ParallelDims, resolve_dims
from torchtitan.mesh.settings import CommConfig
from torchtitan.metrics.ledger import read_hardware
from torchtitan.metrics.settings import MetricsConfig, ProfilingConfig
from torchtitan.resume_rules import Job


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps that were trained one after another with the same batch and layout."""

    first_step: int
    last_step: int
    begin: int
    """Place of the first sample among those that are not left out."""
    dims: ParallelDims
    config: Config
    fingerprint: dict[str, str] | None
    """Of the data, as the checkpoint has it."""
    said_by: str
    doubt: str = ""
    """Why the position may be wrong; empty: it is not."""

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return samples_per_step(self.config, self.dims)

    @cached_property
    def gaps(self) -> SkippedSamples:
        """What is left out of the order."""
        return SkippedSamples(self.config.training.skip_samples)

    def samples(self, step: int) -> list[int]:
        """Return the numbers of the samples of a step, in their order."""
        begin = self.begin + (step - self.first_step) * self.batch
        return [self.gaps.number(place) for place in range(begin, begin + self.batch)]

    def step_of(self, sample: int) -> int | None:
        """Return the step that a sample was part of; None: none of these."""
        if self.gaps.holds(sample):
            return None
        step = self.first_step + (self.gaps.place(sample) - self.begin) // self.batch
        return step if self.first_step <= step <= self.last_step else None

    def reader_of(self, sample: int) -> tuple[int, int, list[int]]:
        """Return the data-parallel rank that reads a sample, the microbatch, and the ranks that
        share it."""
        dims, place = self.dims, (self.gaps.place(sample) - self.begin) % self.batch
        microbatch, dp_rank = divmod(place // self.config.training.local_batch_size, dims.dp)
        inner = dims.cp * dims.tp
        firsts = [(stage * dims.dp + dp_rank) * inner for stage in range(dims.pp)]
        return dp_rank, microbatch, [first + i for first in firsts for i in range(inner)]


def stretch_of(history: Sequence[Stretch], step: int) -> Stretch:
    """Return the stretch that has a step; raise ConfigError if none has."""
    for stretch in history:
        if stretch.first_step <= step <= stretch.last_step:
            return stretch
    last = history[-1].last_step if history else 0
    raise ConfigError(f"--step must be one of the run's steps, 1 to {last}, got {step}")


def samples_per_step(config: Config, dims: ParallelDims) -> int:
    """Return the global batch of a job in a layout."""
    local, batch = config.training.local_batch_size, config.training.global_batch_size
    return local * dims.dp * accumulation_steps(batch, local_batch_size=local, dp=dims.dp)


def read_history(run: Path, *, world_size: int | None = None) -> list[Stretch]:
    """Return all steps of a run, those included that are still to come.

    `world_size`: the ranks of the steps after the last checkpoint, if not those of the last start.

    Raises:
        UserError: The run has no settings, or a checkpoint is damaged.
    """
    config = Job.stored_in(run / CONFIG_FILE).config
    folder = run / config.checkpoint.local_folder
    stretches: list[Stretch] = []
    step = position = 0
    for saved in find_steps(folder):
        found, end = _until(folder / f"step-{saved}", begin=step, position=position)
        if saved > step:  # step 0 holds the initial weights
            stretches.append(found)
        step, position = saved, end
    if step < config.training.steps:
        stretches.append(_after(run, config, step, position, world_size=world_size))
    return [replace(one, config=without_places(one.config)) for one in stretches]


def without_places(config: Config) -> Config:
    """Return stored settings with the default folders of traces and TensorBoard, and no URL as
    cache: a stranger may have chosen places outside of the run's folder."""
    comm, tb, traces = CommConfig(), MetricsConfig().save_tb_folder, ProfilingConfig()
    config = replace(
        config,
        comm=replace(
            config.comm,
            save_traces_folder=comm.save_traces_folder,
            save_traces_file_prefix=comm.save_traces_file_prefix,
        ),
        metrics=replace(config.metrics, save_tb_folder=tb),
        profiling=replace(config.profiling, save_traces_folder=traces.save_traces_folder),
    )
    if not is_url(config.training.dataset_cache):
        return config
    return replace(config, training=replace(config.training, dataset_cache=DEFAULT_CACHE))


def _until(checkpoint: Path, *, begin: int, position: int) -> tuple[Stretch, int]:
    """Return the steps after `begin` up to a checkpoint, and its position."""
    manifest = read_json(checkpoint / MANIFEST).check_types({"step": int, "config": str})
    state = read_json(checkpoint / "dataloader" / STATE)
    state.check_types({"position": int, "fingerprint": dict}).check_counts("position")
    dims, step = stored_layout(manifest), manifest["step"]
    if step < begin:
        raise CheckpointError(f"{manifest.path} is of step {step}; restore it, or move it away")
    config = Job.stored(manifest["config"], file=manifest.path, dp=dims.dp).config
    gaps = SkippedSamples(config.training.skip_samples)
    first = gaps.place(state["position"]) - (step - begin) * samples_per_step(config, dims)
    doubt = ""
    # at 0 the data began anew, which exclude_from_loading asks for
    if first not in (gaps.place(position), 0):
        doubt = (
            f"between steps {begin} and {step} the batch changed, or the run came from another "
            f"folder, and the checkpoint of that step is gone: steps before it had other samples"
        )
    found = Stretch(
        first_step=begin + 1,
        last_step=step,
        begin=first,
        dims=dims,
        config=config,
        fingerprint=state["fingerprint"],
        said_by=f"{checkpoint.name}, counted back from its position",
        doubt=doubt,
    )
    return found, state["position"]


def _after(
    run: Path, config: Config, step: int, position: int, *, world_size: int | None
) -> Stretch:
    if world_size is not None and world_size < 1:
        raise ConfigError(f"--world_size must be at least 1, got {world_size}")
    doubt = ""
    if world_size is None:
        try:
            hardware = read_hardware(run)
        except DataError as error:
            raise DataError(f"{error}; or say --world_size") from error
        world_size = hardware.world_size
        if step == 0 and hardware.resumed_from:
            doubt = (
                f"the last start went on from step {hardware.resumed_from}, which is not in this "
                f"folder: the position is right if the batch was always the same"
            )
    dims = resolve_dims(config.parallelism, world_size=world_size)
    return Stretch(
        first_step=step + 1,
        last_step=config.training.steps,
        begin=SkippedSamples(config.training.skip_samples).place(position),
        dims=dims,
        config=config,
        fingerprint=None,
        said_by=f"{CONFIG_FILE}, counted from step {step} on",
        doubt=doubt,
    )
