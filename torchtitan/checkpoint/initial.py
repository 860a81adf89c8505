"""The step of a run, or the DCP folder, that `checkpoint.initial_load_path` names."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.base.urls import is_url
from torchtitan.checkpoint.rows import HeadDim
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import (
    Checkpoint,
    DCPFolder,
    ParameterFilter,
    WeightSource,
    row_order,
    stated_order,
)
from torchtitan.checkpoint.steps import resolve_step
from torchtitan.checkpoint.storage import step_of
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.spec import ModelSpec

logger = logging.getLogger(__name__)
INITIAL_PATH = "checkpoint.initial_load_path"
FETCHED = "initial"
"""Inside the folder of checkpoints: the step that a URL as initial_load_path names."""


def find_initial(
    settings: CheckpointConfig, *, folder: Path, group: dist.ProcessGroup
) -> tuple[Path, CheckpointConfig]:
    """Return the path that the setting names, on this machine, and the settings to read it with.

    The step that a URL names is downloaded into `folder`.
    """
    assert settings.initial_load_path is not None
    if not is_url(settings.initial_load_path):
        return Path(settings.initial_load_path), settings
    from torchtitan.checkpoint.remote import RemoteCheckpoints

    url, number = settings.initial_load_path.rstrip("/"), settings.load_step
    if (named := step_of(PurePosixPath(url))) is not None:
        url, number = url.rpartition("/")[0], named
    remote = RemoteCheckpoints(
        url, key=INITIAL_PATH, settings=settings, folder=folder / FETCHED, group=group
    )
    return remote.fetch(number), replace(settings, load_step=-1)


def open_step(
    path: Path,
    *,
    settings: CheckpointConfig,
    spec: ModelSpec,
    rope_head_dim: HeadDim,
    filter: ParameterFilter,
    group: dist.ProcessGroup,
) -> WeightSource:
    """Open a checkpoint of this library, or a DCP folder.

    Args:
        path: The folder, or the run that holds it.
        settings: The section [checkpoint].
        spec: Family of the model.
        rope_head_dim: Returns the head width of a parameter that may be stored in the half-split
            order, else None.
        filter: Selects parameters.
        group: All ranks.

    Raises:
        CheckpointError: It does not exist, is damaged, or its order of rows is unknown.
    """
    step, is_ours = resolve_step(
        path,
        subfolder=settings.local_folder,
        load_step=settings.load_step,
        verifies=settings.verify_on_load,
        group=group,
    )
    if is_ours:
        if settings.initial_load_rope != "auto":
            raise CheckpointError(
                f"checkpoint.initial_load_rope is for weights of other programs, and {step} is of "
                f"this library, which knows the order of its rows; remove it"
            )
        return Checkpoint(path=step, filter=filter, group=group)
    logger.info("%s has no sizes: they are those of model.flavor", step)
    order = row_order(
        step,
        stated=on_first_rank(lambda: stated_order(step), group=group),
        setting=settings.initial_load_rope,
        spec=spec,
        may_assume=True,
    )
    head_dim: HeadDim = rope_head_dim if order != "interleaved" else lambda name: None
    return DCPFolder(path=step, rope_head_dim=head_dim, filter=filter, group=group)
