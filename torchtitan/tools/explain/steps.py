"""The samples of each step of a run, computed from its checkpoints and settings.

The position in the data is one number, and a step adds the global batch to it. A start may change
the batch and the layout. Each checkpoint holds its position, and the settings and layout of the
start that saved it, so steps up to a checkpoint are counted back from it. Steps after the last
checkpoint, and steps of a run without checkpoints, are counted from `config.toml`. Only small JSON
files are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import read_json
from torchtitan.checkpoint.checksums import MANIFEST
from torchtitan.checkpoint.start import stored_layout
from torchtitan.checkpoint.storage import STATE, find_steps
from torchtitan.data.loader import accumulation_steps
from torchtitan.data.sampler import SkippedSamples
from torchtitan.job import CONFIG_FILE, Config
from torchtitan.mesh.dims import ParallelDims, resolve_dims
from torchtitan.metrics.events import read_events, read_hardware
from torchtitan.resume_rules import Job


@dataclass(kw_only=True)
class Stretch:
    """Consecutive steps with the same batch and layout."""

    first_step: int
    last_step: int
    dims: ParallelDims
    config: Config
    origin: str
    """The file that gives the position."""
    fingerprint: dict[str, str] | None = None
    """Fingerprint of the data in the checkpoint. None: no checkpoint follows."""
    doubt: str = ""
    """Why the position may be wrong."""
    start: int = 0
    """Position of the first sample, skipped samples not counted."""
    batch: int = field(init=False)
    """Number of samples per step."""
    skipped: SkippedSamples = field(init=False)
    """Samples that are left out of the order."""

    def __post_init__(self) -> None:
        training, dp = self.config.training, self.dims.dp
        local, batch = training.local_batch_size, training.global_batch_size
        self.batch = local * dp * accumulation_steps(batch, local_batch_size=local, dp=dp)
        self.skipped = SkippedSamples(training.skip_samples)

    def samples(self, step: int) -> list[int]:
        """Return the numbers of the samples of a step, in order."""
        start = self.start + (step - self.first_step) * self.batch
        return [self.skipped.number_at(i) for i in range(start, start + self.batch)]

    def step_of(self, sample: int) -> int | None:
        """Return the step of a sample, or None if it is in no step of this stretch."""
        if self.skipped.holds(sample):
            return None
        step = self.first_step + (self.skipped.offset_of(sample) - self.start) // self.batch
        return step if self.first_step <= step <= self.last_step else None

    def reader_of(self, sample: int) -> tuple[list[int], int]:
        """Return the ranks that read a sample, and the microbatch."""
        dims, position = self.dims, (self.skipped.offset_of(sample) - self.start) % self.batch
        microbatch, dp_rank = divmod(position // self.config.training.local_batch_size, dims.dp)
        inner = dims.cp * dims.tp
        firsts = [(stage * dims.dp + dp_rank) * inner for stage in range(dims.pp)]
        return [first + i for first in firsts for i in range(inner)], microbatch


def read_history(run: Path) -> list[Stretch]:
    """Return all steps of a run, including those that are not trained yet; raise UserError if the
    run has no settings, or a checkpoint is damaged."""
    config = Job.stored_in(run / CONFIG_FILE).config
    folder = run / config.checkpoint.local_folder
    stretches: list[Stretch] = []
    step = position = 0
    for saved in find_steps(folder):
        stretch, end = _until(folder / f"step-{saved}", after=step, position=position)
        if saved > step:  # step 0 has the initial weights
            stretches.append(stretch)
        step, position = saved, end
    last_step = config.training.steps
    if config.training.num_epochs is not None:
        starts = [row for row in read_events(run) if row["event"] == "start"]
        last_step = starts[-1]["last_step"] if starts else step
    if step < last_step:
        hardware = read_hardware(run)
        stretch = Stretch(
            first_step=step + 1,
            last_step=last_step,
            dims=resolve_dims(config.parallelism, world_size=hardware.world_size),
            config=config,
            origin=f"{CONFIG_FILE}, counted from step {step}",
        )
        stretch.start = stretch.skipped.offset_of(position)
        if step == 0 and hardware.resumed_from:
            stretch.doubt = (
                f"the last start resumed from step {hardware.resumed_from}, which is not in this "
                f"folder: the position is correct if the batch was always the same"
            )
        stretches.append(stretch)
    return stretches


def _until(checkpoint: Path, *, after: int, position: int) -> tuple[Stretch, int]:
    """Return the steps from `after` to a checkpoint, and its position."""
    manifest = read_json(checkpoint / MANIFEST).check_types({"step": int, "config": str})
    state = read_json(checkpoint / "dataloader" / STATE)
    state.check_types({"position": int, "fingerprint": dict}).check_counts("position")
    dims, step = stored_layout(manifest), manifest["step"]
    if step < after:
        raise CheckpointError(f"{manifest.path} has step {step}; restore it or move it away")
    stretch = Stretch(
        first_step=after + 1,
        last_step=step,
        dims=dims,
        config=Job.stored(manifest["config"], file=manifest.path, dp=dims.dp).config,
        fingerprint=state["fingerprint"],
        origin=f"{checkpoint.name}, counted back from its position",
    )
    skipped = stretch.skipped
    stretch.start = skipped.offset_of(state["position"]) - (step - after) * stretch.batch
    # 0: the data were started again, by exclude_from_loading
    if stretch.start not in (skipped.offset_of(position), 0):
        stretch.doubt = (
            f"between steps {after} and {step} the batch changed, or the run came from another "
            f"folder, and the checkpoint of that step is deleted: earlier steps had other samples"
        )
    return stretch, state["position"]
