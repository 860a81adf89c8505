"""Checkpoints of a run in an object store.

With a URL as `checkpoint.folder`, each checkpoint is first saved to a local folder, as without a
store, and then uploaded. Writing to the store directly would need no disk, but a second
implementation of writing, verifying and recovering, and a save would take as long as the network.
The next save waits for the upload, so the disk holds the retained checkpoints and one more.

    s3://bucket/run/step-20/model/__0_0.distcp ...   uploaded under their final names
    s3://bucket/run/step-20/manifest.json            uploaded last: commits the checkpoint
    s3://bucket/run/.owner                           the run that may commit

A store has no rename, so the manifest commits a checkpoint. It lists every file with size and
checksum. Rank 0 uploads it after all ranks have uploaded their files and the store shows each file
with its size. Stores list an object as soon as it is written (S3, Google Cloud Storage and Azure
do). A checkpoint is deleted or replaced by removing its manifest first.

Machines may share a disk or have their own (`disks.py`). The ranks of a disk upload its files, and
download all files of the checkpoint from which the run resumes. A checkpoint that was saved but not
uploaded when the run died is uploaded at the next start, so a run always resumes from a checkpoint
in the store.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.base.stored_json import parse_json
from torchtitan.checkpoint.checksums import (
    MANIFEST,
    FileRecord,
    HashingFile,
    find_damage,
    is_sealed,
    list_files,
    share_files,
    summarize,
)
from torchtitan.checkpoint.disks import find_disks, on_each_disk
from torchtitan.checkpoint.objects import ObjectStore, in_parallel
from torchtitan.checkpoint.retention import Retention
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import (
    STEP_NAME,
    commit,
    draft_of,
    list_steps,
    make_draft,
    recover_commits,
    set_aside_after,
)
from torchtitan.mesh.ranks import on_every_rank, on_first_rank

T = TypeVar("T")
logger = logging.getLogger(__name__)
OWNER, ASIDE = ".owner", f"{MANIFEST}.aside"
WHOLE_EXPORT = ("config.json", "adapter_config.json")
"""Files that identify a Hugging Face folder to other programs; uploaded last."""


class RemoteCheckpoints:
    """Checkpoints of one run in a store, with copies on local disks. All methods are collective.

    Args:
        url: URL of the run's folder.
        key: Setting that holds the URL, for errors.
        settings: The section [checkpoint].
        folder: Local parent of the `step-N` folders.
        group: All ranks.

    Raises:
        ConfigError: The package for such URLs is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str,
        settings: CheckpointConfig,
        folder: Path,
        group: dist.ProcessGroup,
    ) -> None:
        self._store = ObjectStore(url, key=key, patience_seconds=settings.upload_timeout_seconds)
        self._folder = folder
        self._group = group
        self.disk = find_disks(folder, group=group, timeout_seconds=settings.save_timeout_seconds)
        """Ranks that share this rank's disk. None: all of `group`."""
        self._verifies = settings.verify_on_load
        who = f"process {os.getpid()} on host {platform.node()}"
        self._owner = f"{secrets.token_hex(8)} {who}".encode()
        self._damaged: set[int] = set()

    @property
    def url(self) -> str:
        """The store's URL."""
        return self._store.url

    def pull_newest(self) -> None:
        """Make the newest valid checkpoint the newest one in the store and in `folder`.

        Raises:
            CheckpointError: All checkpoints are damaged, the store fails, or ranks see different
                stores.
        """
        self._take_over()
        on_each_disk(lambda: recover_commits(self._folder), group=self._group, disk=self.disk)
        stored = on_first_rank(lambda: find_steps(self._store), group=self._group)
        local = on_first_rank(lambda: list_steps(self._folder), group=self._group)
        newest = max(stored, default=-1)
        stored += self._finish_upload([step for step, _ in local if step > newest])
        for step in reversed(stored):
            mistakes = self.pull(f"step-{step}")
            if not mistakes:
                later = partial(set_aside_after, self._folder, step, but=step)
                on_each_disk(later, group=self._group, disk=self.disk)
                return
            self._damaged.add(step)
            self._warn_of_damage(f"{self.url}/step-{step}", mistakes)
        if stored or local:
            raise CheckpointError(
                f"all checkpoints in {self.url} ({len(stored)}) and {self._folder} ({len(local)}) "
                f"are damaged; restore one from a copy, or choose other folders to start from "
                f"scratch"
            )

    def _take_over(self) -> None:
        """Make this run the owner of the store, and check that all ranks see the same store."""

        def write() -> bytes:
            self._store.write(OWNER, self._owner)
            return self._owner

        owner = on_first_rank(write, group=self._group)
        seen = on_every_rank(lambda: self._store.read(OWNER) == owner, group=self._group)
        if apart := [str(rank) for rank, sees_it in enumerate(seen) if not sees_it]:
            raise CheckpointError(
                f"checkpoint.folder {self.url} must be one store for all ranks, and ranks "
                f"{', '.join(apart)} do not see what rank 0 wrote: each machine may have its own; "
                f"use a store that all machines reach"
            )

    def _finish_upload(self, steps: list[int]) -> list[int]:
        """Upload the newest valid one of the local `steps`; return it as a list, or []."""
        for step in reversed(steps):
            folder = self._folder / f"step-{step}"
            manifest = on_first_rank(partial(read_sealed, folder), group=self._group)
            mistakes = [f"{MANIFEST} is missing or damaged"]
            if manifest is not None:
                mistakes = self._find_local_damage(folder, listed(manifest))
            if not mistakes:
                if dist.get_rank(self._group) == 0:
                    logger.info(
                        "%s was not uploaded by the run that saved it; uploading it", folder
                    )
                self.push(f"step-{step}")
                return [step]
            self._warn_of_damage(folder, mistakes)
        return []

    def _find_local_damage(self, folder: Path, files: Mapping[str, FileRecord]) -> list[str]:
        """Return the mistakes in the files of all disks."""
        mine = self._share_present(folder, files)
        found = on_every_rank(
            lambda: (set(mine), find_damage(folder, mine, hashes=self._verifies)),
            group=self._group,
        )
        missing = files.keys() - set().union(*(names for names, _ in found))
        wrong = {mistake for _, mistakes in found for mistake in mistakes}
        return sorted([*(f"{name} is missing" for name in missing), *wrong])

    def _warn_of_damage(self, place: Path | str, mistakes: list[str]) -> None:
        if dist.get_rank(self._group) == 0:
            logger.warning("%s is damaged and is not used: %s", place, summarize(mistakes))

    def pull(self, name: str) -> list[str]:
        """Download a checkpoint to each disk that lacks it; return mistakes in the stored one."""
        manifest = on_first_rank(lambda: self._store.read(f"{name}/{MANIFEST}"), group=self._group)
        if manifest is None or not is_sealed(manifest):
            return [f"{MANIFEST} is {'missing' if manifest is None else 'damaged'}"]
        target, files = self._folder / name, listed(manifest)
        draft, mine = draft_of(target), self._share(files)

        def is_whole() -> bool:
            is_same = read_sealed(target) == manifest
            return is_same and not find_damage(target, mine, hashes=self._verifies)

        is_here = all(self._on_this_disk(is_whole))
        if not is_here and dist.get_rank(self._group) == 0:
            logger.info("Fetching %s/%s into %s", self.url, name, target)

        def open_draft() -> None:
            if not is_here:
                make_draft(target, sorted({str(Path(file).parent) for file in files}))

        def fetch(file: str) -> str | None:
            return self._store.fetch(f"{name}/{file}", draft / file, record=files[file])

        def close_draft() -> None:
            if not is_here:
                with HashingFile(draft / MANIFEST) as file:
                    file.write(manifest)
                commit(target)

        on_each_disk(open_draft, group=self._group, disk=self.disk)
        found = on_every_rank(
            lambda: [] if is_here else in_parallel(fetch, mine), group=self._group
        )
        if mistakes := sorted({mistake for each in found for mistake in each if mistake}):
            return mistakes
        on_each_disk(close_draft, group=self._group, disk=self.disk)
        return []

    def _on_this_disk(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank; return the results of the ranks of this disk."""
        found = on_every_rank(action, group=self._group)
        disk = self.disk or self._group
        return [found[rank] for rank in dist.get_process_group_ranks(disk)]

    def _share(self, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Return this rank's share of the files on its disk."""
        disk = self.disk or self._group
        return share_files(files, rank=dist.get_rank(disk), num_ranks=dist.get_world_size(disk))

    def _share_present(
        self, folder: Path, files: Mapping[str, FileRecord]
    ) -> dict[str, FileRecord]:
        """Return the files of this rank's share that exist on its disk."""
        mine = self._share(files)
        return {name: record for name, record in mine.items() if (folder / name).is_file()}

    def fetch(self, load_step: int) -> Path:
        """Download `load_step` (-1: the newest valid step) from a store of another run.

        Returns:
            The folder of the local copy.

        Raises:
            CheckpointError: The store has no valid checkpoint, or the named one is damaged.
        """
        steps = on_first_rank(lambda: find_steps(self._store), group=self._group)
        for step in reversed(steps if load_step == -1 else [load_step]):
            target = self._folder / f"step-{step}"
            if not (mistakes := self.pull(target.name)):
                return target
            if load_step != -1:
                raise CheckpointError(
                    f"{self.url}/{target.name} is missing or damaged: {summarize(mistakes)}; the "
                    f"store has the steps {', '.join(map(str, steps)) or 'none'}"
                )
            self._warn_of_damage(f"{self.url}/{target.name}", mistakes)
        raise CheckpointError(
            f"{self.url} must be the URL of a step or of a folder of checkpoints of this library; "
            f"no valid one was found"
        )

    def push(self, name: str) -> None:
        """Upload the local checkpoint `name`, its manifest last.

        Raises:
            CheckpointError: A file is missing or damaged, the store failed, or another run took
                the store over.
        """
        folder = self._folder / name
        manifest = on_first_rank(lambda: read_sealed(folder), group=self._group)
        if manifest is None:
            raise CheckpointError(f"{folder} has no valid {MANIFEST}, and cannot be uploaded")
        if not on_first_rank(lambda: self._make_way(name, manifest), group=self._group):
            return
        files = listed(manifest)
        mine = self._share_present(folder, files)

        def put(file: str) -> bool:
            return self._store.put(folder / file, f"{name}/{file}", record=files[file])

        sent = on_every_rank(lambda: in_parallel(put, mine), group=self._group)
        on_first_rank(lambda: self._commit(name, manifest), group=self._group)
        num_sent = sum(sum(each) for each in sent)
        logger.info("Uploaded %s/%s: %d of %d files", self.url, name, num_sent, len(files))

    def _make_way(self, name: str, manifest: bytes) -> bool:
        """Remove the manifest of a different checkpoint of this name; return whether to upload."""
        self._check_owner()
        there = self._store.read(f"{name}/{MANIFEST}")
        if there is not None and there != manifest:
            self._store.remove([f"{name}/{MANIFEST}"])
        return there != manifest

    def _check_owner(self) -> None:
        """Raise CheckpointError if another run took the store over."""
        owner = self._store.read(OWNER) or b""
        if owner != self._owner:
            raise CheckpointError(
                f"{self.url} must belong to one run at a time, and another run took it over: "
                f"{owner.decode(errors='replace').partition(' ')[2] or 'unknown'}; end one of "
                f"them, or choose another checkpoint.folder"
            )

    def _commit(self, name: str, manifest: bytes) -> None:
        """Write the manifest of a checkpoint after checking the size of each file in the store."""
        self._check_owner()
        there = self._store.list_sizes(name)
        mistakes = [
            f"{file} is missing or has another size"
            for file, record in listed(manifest).items()
            if there.get(f"{name}/{file}") != record.size
        ]
        if mistakes:
            raise CheckpointError(
                f"{self.url}/{name} cannot be committed: {summarize(mistakes)}; run the same "
                f"command again, and let no machine change or remove files of a checkpoint"
            )
        self._store.write(f"{name}/{MANIFEST}", manifest)

    def push_export(self, name: str) -> None:
        """Upload a Hugging Face folder, its config last; raise CheckpointError on failure."""
        folder = self._folder / name
        on_first_rank(
            lambda: self._store.put_folder(folder, name, last=WHOLE_EXPORT), group=self._group
        )
        logger.info("Uploaded %s/%s", self.url, name)

    def prune(self, saved: int, kept: Retention) -> None:
        """After the upload of step `saved`, delete steps that `kept` does not retain and files of
        steps that were never committed, and set damaged steps aside."""
        on_first_rank(lambda: self._prune(saved, kept), group=self._group)
        self._damaged.clear()

    def _prune(self, saved: int, kept: Retention) -> None:
        try:
            for step in self._damaged - {saved}:
                self._set_aside(f"step-{step}")
            steps = find_steps(self._store)
            for step in kept.steps_to_delete(steps, manifest_of=self._read_manifest):
                self._delete(f"step-{step}")
            for step in list_folders(self._store):
                if step not in steps and self._store.size(f"step-{step}/{ASIDE}") is None:
                    self._delete(f"step-{step}")
        except CheckpointError as error:
            # the newest checkpoints are committed
            logger.warning("Could not prune %s; the next save tries again: %s", self.url, error)

    def _read_manifest(self, step: int) -> Mapping[str, Any]:
        name = f"step-{step}/{MANIFEST}"
        content = self._store.read(name)
        if content is None or not is_sealed(content):
            raise CheckpointError(f"{self.url}/{name} is missing or damaged")
        return parse_json(content, path=Path(name))

    def _set_aside(self, name: str) -> None:
        """Rename the manifest of a damaged checkpoint; keep its files."""
        if content := self._store.read(f"{name}/{MANIFEST}"):
            self._store.write(f"{name}/{ASIDE}", content)
            self._store.remove([f"{name}/{MANIFEST}"])
            logger.warning("%s/%s is damaged and was set aside", self.url, name)

    def _delete(self, name: str) -> None:
        """Delete a checkpoint: its manifest first, then listed and other files."""
        manifest = self._store.read(f"{name}/{MANIFEST}")
        self._store.remove([f"{name}/{MANIFEST}"])
        files = listed(manifest) if manifest is not None and is_sealed(manifest) else {}
        there = {*(f"{name}/{file}" for file in files), *self._store.list_sizes(name)}
        self._store.remove(there - {f"{name}/{MANIFEST}"})


def read_sealed(folder: Path) -> bytes | None:
    """Return the manifest of a local checkpoint; None if it is missing or damaged."""
    path = folder / MANIFEST
    content = path.read_bytes() if path.is_file() else b""
    return content if is_sealed(content) else None


def listed(manifest: bytes) -> dict[str, FileRecord]:
    """Return the files that a sealed manifest lists."""
    return list_files(parse_json(manifest, path=Path(MANIFEST)))


def list_folders(store: ObjectStore) -> list[int]:
    """Return the steps of all `step-N` in a listing, committed or not, ascending."""
    matches = (STEP_NAME.fullmatch(name.rpartition("/")[2]) for name in store.list_names())
    return sorted(int(match[1]) for match in matches if match)


def find_steps(store: ObjectStore) -> list[int]:
    """Return the committed steps, ascending."""
    steps = list_folders(store)
    sizes = in_parallel(lambda step: store.size(f"step-{step}/{MANIFEST}"), steps)
    return [step for step, size in zip(steps, sizes, strict=True) if size is not None]
