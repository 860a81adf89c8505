"""Which folder a path means: a step's own, the newest of many, or one that another trainer wrote.

A checkpoint that is asked for by name is that one or an error; among many a damaged one is passed
over for the one before it. A folder without our checksums is taken by its own name alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal, cast

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.hf_folder import is_hf_folder
from torchtitan.checkpoint.metadata import METADATA
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.models.spec import ModelSpec, RopeOrder

logger = logging.getLogger(__name__)


def newest_step(
    folder: Path, *, verify: bool, group: dist.ProcessGroup, finish: bool = False
) -> Path | None:
    """Return the newest whole step of ours; `finish` commits that were broken off at the end."""
    step = storage.newest_whole(folder, group=group, verify=verify, finish=finish)
    return None if step is None else folder / f"step-{step}"


def checked_step(source: Path, *, verify: bool, group: dist.ProcessGroup) -> Path:
    """Return a checkpoint that was asked for by name, which no other may replace."""
    mistakes = storage.verify(source, group=group) if verify else []
    if mistakes:
        raise CheckpointError(
            f"{source}, asked for by name, is damaged: {storage.summary(mistakes)}; name another, "
            f"or load it as it is by checkpoint.verify_on_load = false"
        )
    return source


def is_plain_dcp(path: Path) -> bool:
    """Tell whether another writer made this DCP folder: it has no manifest of ours."""
    return (path / METADATA).is_file() and not (path / storage.MANIFEST).is_file()


def row_order(
    folder: Path,
    *,
    setting: Literal["auto", "interleaved", "halves"],
    spec: ModelSpec,
    group: dist.ProcessGroup,
) -> RopeOrder:
    """Return in which order a plain DCP folder holds the rows of wq and wk, and log why.

    Names and shapes are the same in either. Where this library has written the folder it says so.

    Raises:
        CheckpointError: The folder says another order than the setting.
    """
    said = storage.on_first_rank(lambda: _said_order(folder), group=group)
    if said is not None and setting not in ("auto", said):
        raise CheckpointError(
            f'checkpoint.initial_load_rope = "{setting}" is not what {folder} says of itself, '
            f'"{said}"; remove it'
        )
    if said is not None or setting != "auto":
        order = said or cast(RopeOrder, setting)
        logger.info("%s holds the rows of wq and wk %s", folder, _IN_WORDS[order])
        return order
    logger.log(
        logging.INFO if spec.torchtitan_rope == "interleaved" else logging.WARNING,
        "%s does not say how the rows of wq and wk lie: they are taken as torchtitan 0.2 writes "
        "%s, %s; if another writer made it, set checkpoint.initial_load_rope",
        folder,
        spec.name,
        _IN_WORDS[spec.torchtitan_rope],
    )
    return spec.torchtitan_rope


_IN_WORDS: Mapping[RopeOrder, str] = {
    "interleaved": "interleaved, as here: channels (2i, 2i + 1) turn together",
    "halves": "in halves: channels (i, i + D/2) turn together",
}


def _said_order(folder: Path) -> RopeOrder | None:
    if not (folder / storage.STATE).is_file():
        return None
    said = storage.read_state(folder.parent, folder.name).get("rope")
    if said is not None and (not isinstance(said, str) or said not in _IN_WORDS):
        raise CheckpointError(
            f"{folder / storage.STATE} must say rope as {' or '.join(_IN_WORDS)}, got "
            f"{str(said)[:60]!r}; get the folder again"
        )
    return cast(RopeOrder | None, said)


def _plain_steps(folder: Path) -> list[str]:
    """Return the newest step folders of another writer, where there is none of ours."""
    steps = storage.list_steps(folder)
    if any(has_manifest for _, has_manifest in steps):
        return []
    paths = [folder / f"step-{step}" for step, _ in reversed(steps)]
    return [str(path) for path in paths if is_plain_dcp(path)][:3]


def find_source(path: Path, *, settings: CheckpointConfig, group: dist.ProcessGroup) -> Path:
    """Return the folder that `path` means: a step's, which is itself, the newest in it or the run's
    newest, or a DCP folder of another writer.

    Raises:
        CheckpointError: There is no whole checkpoint, or the step that was named is damaged.
    """
    verify = settings.verify_on_load
    if settings.load_step != -1:
        return _named_step(path, settings=settings, group=group)
    for step in (path, path.parent) if path.name == "model" else (path,):
        if storage.on_first_rank((step / storage.MANIFEST).is_file, group=group):
            return checked_step(step, verify=verify, group=group)
    if storage.on_first_rank(lambda: is_plain_dcp(path), group=group):
        logger.info("%s cannot be verified: it has no checksums", path)
        return path
    if storage.on_first_rank(lambda: is_hf_folder(path), group=group):
        raise CheckpointError(
            f"checkpoint.initial_load_path {path} is a folder of Hugging Face; to start from its "
            f"weights write checkpoint.initial_load_in_hf = true"
        )
    for folder in (path, path / settings.folder):
        plain = storage.on_first_rank(partial(_plain_steps, folder), group=group)
        if plain:
            raise CheckpointError(
                f"checkpoint.initial_load_path {path} holds steps of another writer, without "
                f"checksums to find the newest whole one by; name one: {', '.join(plain)}"
            )
        newest = newest_step(folder, verify=verify, group=group)
        if newest is not None:
            return newest
    there = "is a file: name its folder" if path.exists() else "does not exist"
    raise CheckpointError(
        f"checkpoint.initial_load_path must be the folder of a step, of checkpoints or of a run, "
        f"got {path}, which {'holds no whole checkpoint' if path.is_dir() else there}"
    )


def _named_step(path: Path, *, settings: CheckpointConfig, group: dist.ProcessGroup) -> Path:
    """Return the step that `load_step` chooses among those of `path`."""
    name = f"step-{settings.load_step}"
    for step in (path / name, path / settings.folder / name):
        if storage.on_first_rank((step / storage.MANIFEST).is_file, group=group):
            return checked_step(step, verify=settings.verify_on_load, group=group)
        if storage.on_first_rank(partial(is_plain_dcp, step), group=group):
            return step
    raise CheckpointError(
        f"checkpoint.load_step {settings.load_step} is not in {path}; it must be one of the steps "
        f"of initial_load_path, a run's folder or its checkpoint folder"
    )
