"""Settings of figures and traces: the sections [metrics] and [profiling]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torchtitan.base.errors import Violation
from torchtitan.config.settings import CustomObject, LocalPath, NonNegativeInt, PositiveInt


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Figures: when they are logged, and where they are written."""

    log_freq: PositiveInt = 10
    """Log every this many steps. The first and the last step are always logged."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files to save_tb_folder."""
    save_tb_folder: LocalPath = "tb"
    """Folder of the TensorBoard files, inside dump_folder."""
    sinks: tuple[CustomObject, ...] = ()
    """Custom classes that receive the figures, as {path = "package.module:NAME", ...} with their
    keyword arguments, or the path alone: see torchtitan.metrics.sinks.Sink."""
    enable_wandb: bool = False
    """Send figures to Weights & Biases; WANDB_MODE=offline keeps them in dump_folder/wandb."""
    save_for_all_ranks: bool = False
    """Write metrics, TensorBoard and W&B figures on every rank, each to its own files, instead of
    on rank 0."""
    disable_color_printing: bool = False
    """No colors on the console. NO_COLOR and an output that is not a terminal do the same."""


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Profiler traces of training steps, and snapshots of the GPU's memory."""

    enable_profiling: bool = False
    """Write traces on every rank. Recorded steps are slower; results do not change."""
    save_traces_folder: LocalPath = "profile_traces"
    """Folder of the traces, inside dump_folder: step-N/rank_R.json, for chrome://tracing."""
    profile_freq: PositiveInt = 10
    """Steps from one trace, or memory snapshot, to the next."""
    profiler_active: PositiveInt = 1
    """Steps in a trace: the last ones of each profile_freq."""
    profiler_warmup: NonNegativeInt = 3
    """Steps before them with the profiler already on, so that its start-up is not recorded."""
    enable_memory_snapshot: bool = False
    """Write the GPU allocator's history every profile_freq steps and when memory runs out."""
    save_memory_snapshot_folder: LocalPath = "memory_snapshot"
    """Folder of the snapshots, inside dump_folder: iteration_N/rank_R_memory_snapshot.pickle."""

    def violations(self) -> Iterator[Violation]:
        """Check that warm-up and recording fit into the interval."""
        needed = self.profiler_warmup + self.profiler_active
        if self.enable_profiling and self.profile_freq < needed:
            yield Violation(
                ("profile_freq", "profiler_warmup", "profiler_active", "enable_profiling"),
                f"must be at least profiler_warmup + profiler_active ({self.profiler_warmup} + "
                f"{self.profiler_active}), got {self.profile_freq}; try {needed}",
            )
