"""A run's checkpoints in an object store: each is a local checkpoint first, then a copy of it.

What a checkpoint is stays the business of `storage.py`: a folder, whole once it has its name. Where
copies of it lie is the business of this file. With a URL as `checkpoint.folder` each save is
today's local save, into a staging folder, and then an upload; each start first makes the staging
folder hold the newest checkpoint, so that all that reads one reads local files. The alternative, to
write and read a store directly, needs no disk, but a second way of writing, of verifying, of naming
what is half done, in every place that touches a file now; and a save then takes as long as the
network does. The price here is disk: the checkpoints that are kept, and one that is written. While
one is uploaded the next save waits, so there are never more.

    s3://bucket/run/step-20/model/__0_0.distcp ...   written under their final names, and compared
    s3://bucket/run/step-20/manifest.json            written last: it is the commit
    s3://bucket/run/latest                           the newest step, for listings that are late
    s3://bucket/run/.owner                           the process that may commit

A store has no rename, so the manifest takes its place. It names every file with size and checksum,
and is written after every rank has reported that each of its files is there and compares. A reader
that sees no manifest sees no checkpoint; one that sees it finds the files by the names in it, never
by a listing. To delete a checkpoint, or to write another in its place, its manifest goes first.

Who knows what: the manifest, made by the local save, is on every machine; of the files a machine
has those that its own ranks wrote. Ranks look which of them share a disk (`disks.py`), tell each
other what is there, and share out the work. So at a start, too: a step that is whole on the disks
together, and newer than any in the store, was uploaded in part when the run died, or not at all; it
is uploaded first (what is there already compares, and is not sent again). Hence what a run resumes
from is always in the store. Then each disk gets what it lacks of that step, all of its files: ranks
may lie otherwise than those that saved. What a dead run left in the store is removed after the next
commit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.commits import OWNER, Commits, find_steps, listed
from torchtitan.checkpoint.disks import on_each_disk
from torchtitan.checkpoint.files import FileRecord, HashingFile, hash_file, is_sealed
from torchtitan.checkpoint.folders import (
    MANIFEST,
    commit,
    delete,
    draft_of,
    finish_commits,
    list_steps,
    set_aside_after,
)
from torchtitan.checkpoint.objects import ObjectStore, in_parallel
from torchtitan.checkpoint.ranks import on_every_rank, on_first_rank
from torchtitan.checkpoint.retention import Retention
from torchtitan.checkpoint.verify import share, summary

logger = logging.getLogger(__name__)
WHOLE_EXPORT = ("config.json", "adapter_config.json")
"""What programs look for in a folder of Hugging Face."""


class RemoteSteps:
    """The checkpoints of one run in `store`, and in `folder` on each disk; `disk` are the ranks
    that share this one, None: all of `group`, which call every method together."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        folder: Path,
        group: dist.ProcessGroup,
        disk: dist.ProcessGroup | None,
        verifies: bool,
    ) -> None:
        self._store = store
        self._folder = folder
        self._group = group
        self.disk = disk
        self._verifies = verifies
        self._commits = Commits(store)
        self._passed_over: set[int] = set()

    @property
    def url(self) -> str:
        """Where they are."""
        return self._store.url

    # at a start

    def settle(self) -> None:
        """Make `folder` hold the newest whole step of the store and the disks, and that step the
        newest there.

        Raises:
            CheckpointError: There are steps, and none is whole; or the store cannot be used, or is
                not the same for all ranks.
        """
        owner = on_first_rank(self._commits.take, group=self._group)
        seen = on_every_rank(lambda: self._store.read(OWNER) == owner, group=self._group)
        if apart := [str(rank) for rank, is_one in enumerate(seen) if not is_one]:
            raise CheckpointError(
                f"checkpoint.folder {self.url} must be one store for all ranks, and what rank 0 "
                f"has written there is not seen by ranks {', '.join(apart)}: is it a disk of each "
                f"machine's own? Name a store that all machines reach"
            )
        on_each_disk(lambda: finish_commits(self._folder), group=self._group, disk=self.disk)
        stored = on_first_rank(lambda: find_steps(self._store), group=self._group)
        here = on_first_rank(lambda: list_steps(self._folder), group=self._group)
        newest = max(stored, default=-1)
        for step, _ in reversed(here):
            if step > newest and self._finish_upload(step):
                stored.append(step)
                break
        for step in reversed(stored):
            if (mistakes := self.bring(f"step-{step}", self._folder / f"step-{step}")) is None:
                break
            self._passed_over.add(step)
            self._warn_of_damage(f"{self.url}/step-{step}", mistakes)
        else:
            if stored or here:
                raise CheckpointError(
                    f"none of the checkpoints in {self.url} ({len(stored)}) and {self._folder} "
                    f"({len(here)}) is whole; restore one from a copy, or choose other folders to "
                    f"start anew"
                )
            return
        on_each_disk(partial(self._set_aside, step), group=self._group, disk=self.disk)

    def _warn_of_damage(self, place: Path | str, mistakes: list[str]) -> None:
        if dist.get_rank(self._group) == 0:
            logger.warning("%s is damaged and is not used: %s", place, summary(mistakes))

    def _set_aside(self, newest: int) -> None:
        for aside in set_aside_after(self._folder, newest, but=newest):
            logger.warning("%s is newer than what the run resumes from, and is set aside", aside)

    def _finish_upload(self, step: int) -> bool:
        """Upload a step of the disks that the store does not have; tell whether it was whole."""
        folder = self._folder / f"step-{step}"
        manifest = on_first_rank(lambda: read_sealed(folder), group=self._group)
        mistakes = [f"{MANIFEST} is missing or damaged"]
        if manifest is not None:
            files = listed(manifest)
            lacking = self._lacking(folder, files)
            whole = on_every_rank(lambda: files.keys() - lacking, group=self._group)
            mistakes = [f"{name} is missing" for name in files.keys() - set().union(*whole)]
        if mistakes:
            self._warn_of_damage(folder, sorted(mistakes))
            return False
        if dist.get_rank(self._group) == 0:
            logger.info("%s was not uploaded to the end, which comes first", folder)
        self.send(f"step-{step}")
        return True

    def bring(self, name: str, target: Path) -> list[str] | None:
        """Make `target` on each disk the checkpoint `name` of the store; what is there of it
        already is not read again. Return what is wrong with it; None: nothing, it is there."""
        manifest = on_first_rank(lambda: self._store.read(f"{name}/{MANIFEST}"), group=self._group)
        if manifest is None or not is_sealed(manifest):
            return [f"{MANIFEST} is {'missing' if manifest is None else 'damaged'}"]
        files = listed(manifest)
        draft = draft_of(target)

        def open_draft() -> None:
            if target.exists() and read_sealed(target) != manifest:
                delete(target)  # a step of this number that is not the one in the store
            if target.exists():
                return
            for each in {(draft / file).parent for file in files}:
                each.mkdir(parents=True, exist_ok=True)

        on_each_disk(open_draft, group=self._group, disk=self.disk)
        there = on_every_rank(target.exists, group=self._group)
        place = target if there[dist.get_rank(self._group)] else draft
        lacking = {file: files[file] for file in self._lacking(place, files)}
        if place == draft and dist.get_rank(self._group) == 0:
            logger.info("Fetching %s/%s into %s", self.url, name, target)
        mine = self._share(lacking)

        def fetch(file: str) -> str | None:
            record = files[file]
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            return self._store.fetch(f"{name}/{file}", place / file, record=record)

        found = on_every_rank(lambda: in_parallel(fetch, mine), group=self._group)
        if mistakes := sorted({mistake for each in found for mistake in each if mistake}):
            return mistakes

        def close_draft() -> None:
            if not target.exists():
                with HashingFile(draft / MANIFEST) as file:
                    file.write(manifest)
                commit(target)

        on_each_disk(close_draft, group=self._group, disk=self.disk)
        return None

    def _lacking(self, folder: Path, files: Mapping[str, FileRecord]) -> set[str]:
        """Return which of the files are not in `folder`, or are not what they must be; the ranks of
        the disk share the work."""

        def lacks(name: str, record: FileRecord) -> bool:
            path = folder / name
            if not path.is_file() or path.stat().st_size != record.size:
                return True
            return self._verifies and hash_file(path) != record.digest

        mine = self._share(files)
        found = on_every_rank(
            lambda: {name for name, record in mine.items() if lacks(name, record)},
            group=self.disk or self._group,
        )
        return set().union(*found)

    def _share(self, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Return this rank's part of the work that its disk has with the files."""
        disk = self.disk or self._group
        return share(files, rank=dist.get_rank(disk), num_ranks=dist.get_world_size(disk))

    def fetch(self, load_step: int) -> Path:
        """Bring a step of a store that is only read, -1: the newest whole one; return its folder.

        Raises:
            CheckpointError: There is none, or the one that was named is damaged.
        """
        steps = on_first_rank(lambda: find_steps(self._store), group=self._group)
        for step in reversed(steps if load_step == -1 else [load_step]):
            target = self._folder / f"step-{step}"
            if (mistakes := self.bring(target.name, target)) is None:
                return target
            if load_step != -1:
                raise CheckpointError(
                    f"{self.url}/{target.name} is not there or damaged: {summary(mistakes)}; it "
                    f"holds the steps {', '.join(map(str, steps)) or 'none'}: name another"
                )
            self._warn_of_damage(f"{self.url}/{target.name}", mistakes)
        raise CheckpointError(
            f"{self.url} must be the URL of a step, or of a folder with steps that this library "
            f"saved, and holds no whole one"
        )

    # after a save

    def send(self, name: str) -> None:
        """Upload the local checkpoint `name`, and commit it by its manifest once every rank has
        reported that its files are there.

        Raises:
            CheckpointError: It is not whole on the disks together, or the store did not take it.
        """
        folder = self._folder / name
        manifest = on_first_rank(lambda: read_sealed(folder), group=self._group)
        if manifest is None:
            raise CheckpointError(f"{folder} has no whole {MANIFEST}, and cannot be uploaded")
        files = listed(manifest)
        if not on_first_rank(lambda: self._make_way(name, manifest), group=self._group):
            return
        mine = self._share(self._owned(folder, files))

        def put(file: str) -> bool:
            return self._store.put(folder / file, f"{name}/{file}", record=files[file])

        sent = on_every_rank(
            lambda: dict(zip(mine, in_parallel(put, mine), strict=True)), group=self._group
        )
        verified = {file: was_needed for each in sent for file, was_needed in each.items()}
        if missing := sorted(files.keys() - verified.keys()):
            raise CheckpointError(
                f"{folder} is not whole on the disks of all ranks together, and was not uploaded: "
                f"{summary([f'{file} is missing' for file in missing])}"
            )
        on_first_rank(lambda: self._commits.commit(name, manifest), group=self._group)
        num_bytes = sum(files[file].size for file, needed in verified.items() if needed)
        logger.info(
            "Uploaded %s/%s: %d of %d files, %.1f MiB",
            self.url,
            name,
            sum(verified.values()),
            len(files),
            num_bytes / 2**20,
        )

    def send_export(self, name: str) -> None:
        """Upload a folder of Hugging Face; its config comes last.

        Raises:
            CheckpointError: The store did not take it.
        """
        folder = self._folder / name
        on_first_rank(
            lambda: self._store.put_folder(folder, name, last=WHOLE_EXPORT), group=self._group
        )
        logger.info("Uploaded %s/%s", self.url, name)

    def _make_way(self, name: str, manifest: bytes) -> bool:
        """Take away the manifest of another checkpoint of this name; tell whether there is
        anything to send."""
        self._commits.check_owner()
        there = self._store.read(f"{name}/{MANIFEST}")
        if there == manifest:
            return False
        if there is not None:
            self._store.remove([f"{name}/{MANIFEST}"])
        return True

    def _owned(self, folder: Path, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Return the files that this disk is to send: those on it, unless an earlier disk has
        them."""
        rank = dist.get_rank(self._group)
        is_first = self.disk is None or dist.get_rank(self.disk) == 0
        # one rank of each disk answers for it
        is_first = is_first and (self.disk is not None or rank == 0)

        def look() -> set[str]:
            return {file for file in files if (folder / file).is_file()} if is_first else set()

        there = on_every_rank(look, group=self._group)
        answers = 0 if self.disk is None else dist.get_global_rank(self.disk, 0)
        before = set().union(*there[:answers])
        return {file: files[file] for file in files if file in there[answers] - before}

    def tidy(self, saved: int, kept: Retention) -> None:
        """Delete steps that need not be kept, and what uploads left that did not end."""
        passed_over = self._passed_over
        on_first_rank(
            lambda: self._commits.tidy(saved, kept, passed_over=passed_over), group=self._group
        )
        passed_over.clear()


def read_sealed(folder: Path) -> bytes | None:
    """Return the manifest of a local checkpoint; None: it is missing or damaged."""
    path = folder / MANIFEST
    content = path.read_bytes() if path.is_file() else b""
    return content if is_sealed(content) else None
