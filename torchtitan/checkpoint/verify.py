"""Is this checkpoint the one that was written, to the last byte?

The manifest lists every file with size and digest. The first rank lists the folder, the ranks share
the files among them, largest first, and exchange what they found, so that all of them come to the
same answer."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from heapq import heapreplace
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.files import (
    Content,
    FileRecord,
    checked_kinds,
    hash_file,
    read_json,
    seal_is_whole,
)
from torchtitan.checkpoint.folders import MANIFEST
from torchtitan.checkpoint.ranks import on_every_rank, on_first_rank

logger = logging.getLogger(__name__)


def verify(checkpoint: Path, *, group: dist.ProcessGroup | None) -> list[str]:
    """Return what is wrong with a checkpoint's files, the same on every rank; empty if it is whole.

    `group` are the ranks that share the work; None is this process alone.
    """
    mistakes, to_hash = on_first_rank(lambda: _survey(checkpoint), group=group)
    rank, num_ranks = (
        (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    )
    mine = share(to_hash, rank=rank, num_ranks=num_ranks)
    found = on_every_rank(lambda: _damaged(checkpoint, mine), group=group)
    return sorted([*mistakes, *(mistake for each in found for mistake in each)])


def summary(mistakes: list[str]) -> str:
    """Put what is wrong into one line."""
    more = f"; and {len(mistakes) - 5} more" if len(mistakes) > 5 else ""
    return "; ".join(mistakes[:5]) + more


def _survey(checkpoint: Path) -> tuple[list[str], dict[str, FileRecord]]:
    """Compare the manifest with the names on disk; return mistakes and what to hash."""
    path = checkpoint / MANIFEST
    try:
        if not path.is_file():
            return [f"{MANIFEST} is missing"], {}
        if not seal_is_whole(path):
            return [f"{MANIFEST} is damaged: its checksum differs"], {}
        listed = records(read_json(path))
        names = _names(checkpoint)
        strays = [
            name
            for name in sorted(names - listed.keys() - {MANIFEST})
            if (checkpoint / name).is_file()  # an editor's lock is a link to nothing
        ]
    except OSError as error:  # a bad disk or missing rights: an older one may be readable
        return [f"it cannot be read: {error}"], {}
    except CheckpointError as error:
        return [str(error)], {}
    if strays:
        # as file managers leave: nothing reads them
        logger.warning("%s holds files that do not belong to it: %s", checkpoint, summary(strays))
    mistakes = [f"{name} is missing" for name in listed.keys() - names]
    return mistakes, {name: record for name, record in listed.items() if name in names}


def _names(folder: Path) -> set[str]:
    """Return the files below a folder; only folders are asked, since there may be many files."""

    def fail(error: OSError) -> None:
        raise error

    return {
        Path(place, name).relative_to(folder).as_posix()
        for place, _, names in os.walk(folder, onerror=fail)
        for name in names
    }


def records(manifest: Content) -> dict[str, FileRecord]:
    """Return what each file must be, by a manifest's list.

    Raises:
        CheckpointError: An entry is not a size and a checksum of a file inside the folder.
    """
    checked_kinds(manifest, kinds={"files": dict})
    found = {}
    for name, entry in manifest["files"].items():
        about: dict[str, Any] = entry if isinstance(entry, dict) else {}
        size, digest, parts = about.get("size", -1), about.get("xxh3_128", 0), name.split("/")
        is_record = type(size) is int and size >= 0 and isinstance(digest, str)
        is_inside = all(parts) and not {".", ".."} & {*parts} and name.isprintable()
        if not (is_record and is_inside) or name == MANIFEST:
            raise CheckpointError(
                f"{manifest.path} must list files inside its folder with size and checksum, got "
                f"{name!r:.80}: {str(entry)[:60]!r}; use another checkpoint"
            )
        found[name] = FileRecord(size, digest)
    return found


def share(files: Mapping[str, FileRecord], *, rank: int, num_ranks: int) -> dict[str, FileRecord]:
    """Return this rank's part of the files, about as many bytes as every other's."""
    loads = [(0, rank) for rank in range(num_ranks)]  # the least, of equal ones the first rank
    mine = {}
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        load, taker = loads[0]
        heapreplace(loads, (load + files[name].size, taker))
        if taker == rank:
            mine[name] = files[name]
    return mine


def _damaged(checkpoint: Path, files: dict[str, FileRecord]) -> list[str]:
    mistakes = []
    for name, record in files.items():
        path = checkpoint / name
        try:
            about = path.stat()
            if not S_ISREG(about.st_mode):  # to open a pipe waits
                mistakes.append(f"{name} is missing")
            elif about.st_size != record.size:
                mistakes.append(f"{name} has {about.st_size} bytes, not {record.size}")
            elif hash_file(path) != record.digest:
                mistakes.append(f"{name} is damaged: its checksum differs")
        except OSError as error:
            mistakes.append(f"{name} cannot be read: {error}")
    return mistakes
