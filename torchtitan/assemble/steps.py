"""Which step of a run is meant by a path that somebody typed."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from torchtitan.assemble.resume import CONFIG_FILE
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.hf import ADAPTER_CONFIG
from torchtitan.trajectory import Job


def find_step(path: Path, *, verify: bool, group: dist.ProcessGroup | None = None) -> Path:
    """Return the folder of the step that `path` means, the same on all ranks of `group`.

    Raises:
        CheckpointError: There is no whole checkpoint, or the step that was named is damaged.
    """
    if (path / storage.MANIFEST).is_file():
        mistakes = storage.verify(path, group=group) if verify else []
        if mistakes:
            raise CheckpointError(
                f"{path} is damaged: {storage.summary(mistakes)}; name another step, or read it as "
                f"it is with --skip_verify"
            )
        return path
    folders = [path]
    if (path / CONFIG_FILE).is_file():
        stored = Job.stored_in(path / CONFIG_FILE)
        folders.append(path / stored.config.checkpoint.folder)
    for folder in folders:
        step = storage.newest_whole(folder, group=group, verify=verify)
        if step is not None:
            return folder / f"step-{step}"
    raise CheckpointError(
        f"a checkpoint must be a run's folder, its checkpoint folder or a step-N folder, got "
        f"{path}, which {_found_instead(path)}"
    )


def _found_instead(path: Path) -> str:
    if not path.is_dir():
        return "does not exist" if not path.exists() else "is a file"
    if (path / ADAPTER_CONFIG).is_file():
        return (
            "holds low-rank factors without the model: name the step of the run that trained them, "
            'or let it export with lora.save = "merged"'
        )
    runs = sorted(str(config.parent) for config in path.glob(f"*/{CONFIG_FILE}"))
    if runs and not (path / CONFIG_FILE).is_file():
        return f"holds runs; name one of them: {', '.join(runs[:8])}"
    return "holds no whole checkpoint; train with --checkpoint.enable to make one"
