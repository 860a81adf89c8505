"""The settings of what is reported and recorded: the sections [metrics] and [profiling]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from torchtitan.base.errors import Violation
from torchtitan.config.schema import ImportPath, LocalPath, NonNegativeInt, PositiveInt, Text


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """What is reported, how often and to where."""

    log_freq: PositiveInt = 10
    """Report every this many steps; the first and the last step are always reported."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files to save_tb_folder."""
    save_tb_folder: LocalPath = "tb"
    """Folder of the TensorBoard files, inside dump_folder."""
    sinks: tuple[Annotated[Text, ImportPath()], ...] = ()
    """Classes of your own that receive the figures: see torchtitan.metrics.sinks.Sink."""
    enable_wandb: bool = False
    """Send figures to Weights & Biases; WANDB_MODE=offline keeps them in dump_folder/wandb."""
    save_for_all_ranks: bool = False
    """Every rank, not rank 0 alone, writes metrics, TensorBoard and W&B figures, in own files."""
    straggler_ratio: Annotated[float, Ge(0)] = 2.0
    """Warn of a rank that takes this many times as long as the others; 0: time none by itself."""
    disable_color_printing: bool = False
    """No colours on the console; NO_COLOR and output that is no terminal do the same."""


@dataclass(frozen=True, kw_only=True)
class ProfilingConfig:
    """Traces of whole steps, to see where the time goes."""

    enable_profiling: bool = False
    """Write a trace of every rank now and then; it slows the recorded steps, and changes none."""
    save_traces_folder: LocalPath = "profile_traces"
    """Folder of the traces, inside dump_folder: step-N/rank_R.json, for chrome://tracing."""
    profile_freq: PositiveInt = 10
    """Steps from one trace to the next."""
    profiler_active: PositiveInt = 1
    """Steps that a trace holds: the last ones of each profile_freq."""
    profiler_warmup: NonNegativeInt = 3
    """Steps before these with the profiler on already, so that its start-up is not recorded."""

    def violations(self) -> Iterator[Violation]:
        """Check that a trace has room for its warmup."""
        needed = self.profiler_warmup + self.profiler_active
        if self.enable_profiling and self.profile_freq < needed:
            yield Violation(
                ("profile_freq", "profiler_warmup", "profiler_active", "enable_profiling"),
                f"must be at least profiler_warmup + profiler_active ({self.profiler_warmup} + "
                f"{self.profiler_active}), got {self.profile_freq}; try {needed}",
            )
