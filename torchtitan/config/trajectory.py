"""Tell whether two jobs train the same thing: what a folder's stored settings are compared with.

A run may be resumed on other hardware, with another log frequency or for more steps, and stays the
same run; with another seed or sequence length it is a different one. The table below lists what
does not count, with the reason; everything else does, so that a new key counts until somebody has
thought about it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchtitan.config.build import build, checked
from torchtitan.config.fields import values_of
from torchtitan.config.layers import Path, flatten, literal
from torchtitan.config.schema import Config
from torchtitan.config.toml_files import parse

_ROUNDING = "changes the order of additions alone: the same training to rounding"

# A section stands for all of its keys.
IGNORED: Mapping[Path, str] = {
    ("job",): "names and places",
    ("metrics",): "what is shown",
    ("checkpoint",): "what is saved",
    ("comm",): "how ranks wait for one another",
    ("parallelism",): _ROUNDING,
    ("activation_checkpoint",): "recomputes the same numbers",
    ("training", "dataloader"): "workers read the same samples in the same order",
    ("training", "dataset_cache"): "where the same tokens are kept",
    ("training", "steps"): "how far along the same curve; it counts through total_steps",
    ("training", "num_epochs"): "when the same order of samples ends",
    ("training", "enable_cpu_offload"): "where the same numbers are kept",
    ("training", "gc_freq"): "when memory is tidied up",
    ("optimizer", "implementation"): _ROUNDING,
    ("debug", "deterministic"): _ROUNDING,
    ("debug", "deterministic_warn_only"): "what is warned of",
}


TOTAL_STEPS = ("lr_scheduler", "total_steps")
STEPS = ("training", "steps")


def trajectory_differences(stored_toml: str, config: Config) -> list[str]:
    """Say which settings that shape the training differ, one line each.

    `stored_toml` is what `to_toml` once wrote. Raises ConfigError if it cannot be read any more.
    """
    origin = "stored settings"
    layer = flatten(parse(stored_toml, origin=origin), origin=origin)
    then = _resolved(checked(build([layer])))
    now = _resolved(config)
    remark = " (as training.steps: total_steps is not given)"
    unpinned = config.lr_scheduler.total_steps is None
    return [
        f"{'.'.join(path)}: stored {literal(then[path])}, now {literal(now[path])}"
        + (remark if path == TOTAL_STEPS and unpinned else "")
        for path in now
        if then[path] != now[path] and not _is_ignored(path)
    ]


def _is_ignored(path: Path) -> bool:
    return any(path[:end] in IGNORED for end in range(1, len(path) + 1))


def _resolved(config: Config) -> dict[Path, object]:
    """Lay the settings out flat, those that follow from others filled in."""
    values = values_of(config)
    if values[TOTAL_STEPS] is None:
        values[TOTAL_STEPS] = values[STEPS]
    if config.training.global_batch_size != -1:
        # a global batch cut into other microbatches is the same batch
        values["training", "local_batch_size"] = None
    return values
