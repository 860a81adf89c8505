"""What is committed in an object store, and by whom: the part of one process, the first rank's.

A step is committed by its manifest alone. Which steps there are, a listing tells; should it be
late, the object `latest` names the newest. The object `.owner` names the process that may commit:
one that started later has taken the store over, and the one before must not write any more.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.files import FileRecord, is_sealed, parse_json
from torchtitan.checkpoint.folders import MANIFEST, STEP_NAME
from torchtitan.checkpoint.objects import ObjectStore, in_parallel
from torchtitan.checkpoint.retention import Retention
from torchtitan.checkpoint.verify import records, summary

logger = logging.getLogger(__name__)
LATEST, OWNER, ASIDE = "latest", ".owner", f"{MANIFEST}.aside"


class Commits:
    """The committed checkpoints of a store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._token = secrets.token_hex(8)

    @property
    def url(self) -> str:
        """Where they are."""
        return self._store.url

    def take(self) -> bytes:
        """Make this process the one that may commit, which also shows that the store takes writes;
        return what all ranks of the run must then read of `OWNER`."""
        who = f"{self._token} process {os.getpid()} on host {platform.node()}".encode()
        self._store.write(OWNER, who)
        try:
            if count := self._store.forget_parts():
                logger.info("%s: removed what %d uploads left that did not end", self.url, count)
        except CheckpointError as error:  # not every user may, nor every store can
            logger.warning("%s; what uploads leave that do not end is not removed", error)
        return who

    def check_owner(self) -> None:
        """Raise CheckpointError if another process has taken the store over."""
        owner = self._store.read(OWNER) or b"nobody"
        if not owner.startswith(self._token.encode()):
            raise CheckpointError(
                f"{self.url} must belong to one run at a time, and another one took it over: "
                f"{owner.decode(errors='replace').partition(' ')[2] or 'unknown'}; end one of "
                f"them, or choose another checkpoint.folder"
            )

    def commit(self, name: str, manifest: bytes) -> None:
        """Make what lies under `name` a checkpoint.

        Raises:
            CheckpointError: Files are not there, or have other sizes; or another process commits.
        """
        self.check_owner()
        there = self._store.list_sizes(name)

        def is_there(file: str) -> bool:
            path, size = f"{name}/{file}", files[file].size
            # a listing may be late
            return there.get(path) == size or self._store.size(path) == size

        files = listed(manifest)
        found = in_parallel(is_there, files)
        if missing := [file for file, is_found in zip(files, found, strict=True) if not is_found]:
            mistakes = [f"{file} is missing or has another size" for file in missing]
            raise CheckpointError(
                f"{self.url}/{name} must hold all {len(files)} files of its {MANIFEST} before it "
                f"is committed, as process {os.getpid()} on host {platform.node()} sees it: "
                f"{summary(mistakes)}; all ranks must see one store"
            )
        self._store.write(f"{name}/{MANIFEST}", manifest)
        if STEP_NAME.fullmatch(name):
            self._store.write(LATEST, name.encode())

    def tidy(self, saved: int, kept: Retention, *, passed_over: Collection[int]) -> None:
        """Delete what need not be kept after a save, and what uploads left that did not end; set
        aside the damaged steps that were `passed_over`."""
        try:
            for step in set(passed_over) - {saved}:
                self._set_aside_there(step)
            steps = find_steps(self._store)
            for step in kept.to_delete(steps, place=self.url, read=self._read_manifest):
                self._delete(step)
            for step in list_folders(self._store):
                if step not in steps and self._store.size(f"step-{step}/{ASIDE}") is None:
                    self._delete(step)
        except CheckpointError as error:
            # the checkpoints that matter are there
            logger.warning("%s is not tidied up, and is tried again later: %s", self.url, error)

    def _read_manifest(self, step: int) -> Mapping[str, Any]:
        content = self._store.read(f"step-{step}/{MANIFEST}")
        if content is None or not is_sealed(content):
            raise CheckpointError(f"{self.url}/step-{step}/{MANIFEST} is missing or damaged")
        return parse_json(content, path=Path(f"step-{step}", MANIFEST))

    def _set_aside_there(self, step: int) -> None:
        name = f"step-{step}"
        if content := self._store.read(f"{name}/{MANIFEST}"):
            self._store.write(f"{name}/{ASIDE}", content)
            self._store.remove([f"{name}/{MANIFEST}"])
            logger.warning("%s/%s was passed over, and is set aside", self.url, name)

    def _delete(self, step: int) -> None:
        """Delete a step, its manifest first: what it names, and what a listing shows beside."""
        name = f"step-{step}"
        manifest = self._store.read(f"{name}/{MANIFEST}")
        self._store.remove([f"{name}/{MANIFEST}"])
        files = listed(manifest) if manifest is not None and is_sealed(manifest) else {}
        there = {*(f"{name}/{file}" for file in files), *self._store.list_names(name, deep=True)}
        self._store.remove(there - {f"{name}/{MANIFEST}"})


def listed(manifest: bytes) -> dict[str, FileRecord]:
    """Return the files that a sealed manifest lists, all of them inside its folder."""
    return records(parse_json(manifest, path=Path(MANIFEST)))


def list_folders(store: ObjectStore) -> list[int]:
    """Return the step of all that a listing shows, committed or not, ascending."""
    matches = (STEP_NAME.fullmatch(name.rpartition("/")[2]) for name in store.list_names())
    return sorted(int(match[1]) for match in matches if match)


def find_steps(store: ObjectStore) -> list[int]:
    """Return the committed steps, ascending: those that a listing shows or that `latest` names, and
    that have a manifest."""
    steps = set(list_folders(store))
    if named := STEP_NAME.fullmatch((store.read(LATEST) or b"").decode(errors="replace")):
        steps.add(int(named[1]))
    return _with_manifest(store, steps)


def _with_manifest(store: ObjectStore, steps: Collection[int]) -> list[int]:
    sizes = in_parallel(lambda step: store.size(f"step-{step}/{MANIFEST}"), sorted(steps))
    return [step for step, size in zip(sorted(steps), sizes, strict=True) if size is not None]
