"""In which type a job computes, resolved once and for all ranks alike.

`mixed_precision_param = "auto"` depends on the machine. It is replaced by the type before anything
is built, so that the run's folder and checkpoints hold the type itself: a job resumed on a machine
where "auto" means another type is refused, not continued as another training.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from torchtitan.base.device import device_type, has_bfloat16
from torchtitan.job import Config


def resolve_precision(config: Config) -> tuple[Config, str]:
    """Return the settings with "auto" resolved, and the reason; the process group must exist."""
    training = config.training
    if training.mixed_precision_param != "auto":
        return config, "as set"
    if training.dtype == "bfloat16":
        chosen, reason = "bfloat16", "auto: as the weights are stored"
    elif config.model.converters:
        chosen, reason = "bfloat16", "auto: as float8 wants it"
    else:
        chosen, reason = _choose(device_type())
    resolved = replace(training, mixed_precision_param=chosen)  # type: ignore[arg-type]
    return replace(config, training=resolved), reason


def _choose(kind: str) -> tuple[str, str]:
    """Ask all ranks: one that computed in another type would train another model."""
    device = "GPUs" if kind == "cuda" else "CPUs"
    lacking = torch.tensor(int(not has_bfloat16(kind)))  # on the host: no GPU is taken yet
    dist.all_reduce(lacking)
    num_lacking, world_size = int(lacking), dist.get_world_size()
    if num_lacking == 0:
        return "bfloat16", f"auto: the {device} multiply it by themselves"
    ranks = "all" if num_lacking == world_size else f"{num_lacking} of {world_size}"
    return "float32", f"auto: the {device} of {ranks} ranks do not multiply bfloat16 by themselves"
