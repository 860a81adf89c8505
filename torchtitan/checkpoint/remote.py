"""Checkpoints of a run in an object store, by fsspec.

With a URL as `checkpoint.folder`, each checkpoint is first saved to a local folder and then
uploaded; it counts as saved once it is in the store.

    s3://bucket/run/step-20/3f9c21d0.../model/__0_0.distcp   files, below the manifest's checksum
    s3://bucket/run/step-20/manifest.json                    written last, commits the step
    s3://bucket/run/step-10/manifest.json.damaged            a step that could not be read
    s3://bucket/run/.owner                                   the run that may commit

A store has no rename, so the manifest commits a step: rank 0 writes it after a listing shows the
files of all ranks with their sizes, and removes it first to delete the step. What a step is, its
objects tell, and nothing else: a start finishes what an earlier process left.
"""

from __future__ import annotations

import itertools
import logging
import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TypeVar

import fsspec
import torch.distributed as dist

from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.base.files import StoredJSON
from torchtitan.base.urls import missing_package, url_problem, without_secrets
from torchtitan.checkpoint.checksums import (
    MANIFEST,
    FileRecord,
    find_damage,
    list_files,
    parse_manifest,
    read_manifest,
    share_files,
    summarize,
    verify,
    write_bytes,
)
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import (
    commit,
    draft_of,
    find_disk,
    list_steps,
    make_draft,
    on_each_disk,
    recover_commits,
    set_aside_after,
    step_of,
)
from torchtitan.mesh.ranks import on_every_rank, on_first_rank, reason

T = TypeVar("T")
StepsToDelete = Callable[[Sequence[int], Callable[[int], StoredJSON | None]], list[int]]
"""Selects steps among all, by their manifests."""
logger = logging.getLogger(__name__)
OWNER, DAMAGED = ".owner", f"{MANIFEST}.damaged"
WHOLE_EXPORT = ("config.json", "adapter_config.json")
"""Files that identify a Hugging Face folder to other programs; uploaded last."""
NUM_FILES = 4
"""Files in flight per rank."""
LONGEST_PAUSE = 30.0
NUM_TRIES = 3
"""Number of times to download a file that arrives damaged."""
_OPTIONS: Mapping[str, dict[str, Any]] = {"file": {"auto_mkdir": True}}
_PUT_OPTIONS: dict[str, Any] = {"max_concurrency": 4}  # s3fs holds 50 MB per concurrent part
_FINAL = (PermissionError, FileNotFoundError, IsADirectoryError)
_FINAL_BY_NAME = re.compile(r"(No|Partial|Default)Credentials|ProfileNotFound|InvalidRegion")


class Store:
    """The objects below a URL, whose requests are repeated. Raises ConfigError if the scheme of
    `url`, the value of the setting `key`, is not supported, or its package is not installed."""

    def __init__(self, url: str, *, key: str, timeout_seconds: float) -> None:
        if problem := url_problem(url):
            raise ConfigError.at(key, problem)
        self.url, self._timeout = url.rstrip("/"), timeout_seconds
        protocol = url.partition("://")[0]
        self._put_options = _PUT_OPTIONS if protocol in ("s3", "s3a") else {}
        options = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **options, **_OPTIONS.get(protocol, {}))
        except ImportError as error:
            raise ConfigError.at(key, missing_package(url, error)) from None
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _request(self, verb: str, name: str, action: Callable[[str], T]) -> T | None:
        """Repeat `action` on the path of `name` until it succeeds; return its result.

        Returns None for an object that is missing. Raises CheckpointError if the error is
        permanent, or the timeout has passed.
        """
        began = time.monotonic()
        for number in itertools.count():
            try:
                return action(self._path(name))
            except Exception as error:  # noqa: BLE001 - each store's client has classes of its own
                if isinstance(error, FileNotFoundError) and verb != "write":
                    return None
                spent, failure = time.monotonic() - began, without_secrets(reason(error))
                is_final = isinstance(error, _FINAL) or _FINAL_BY_NAME.search(type(error).__name__)
            # ranks must not retry in step; training's random generators are not used
            pause = min(0.25 * 2**number, LONGEST_PAUSE) * (0.5 + secrets.randbelow(1000) / 1000)
            if is_final or spent + pause > self._timeout:
                raise CheckpointError(
                    f"{self.url}: could not {verb} {name} for {spent:.0f} s: {failure}; fix the "
                    f"access to the store, and run the same command again"
                )
            logger.warning("%s: could not %s %s, trying again: %s", self.url, verb, name, failure)
            time.sleep(pause)
        raise AssertionError("an endless loop ended")

    def read(self, name: str) -> bytes | None:
        """Return an object, None if it does not exist."""
        return self._request("read", name, lambda path: bytes(self._fs.cat_file(path)))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._request("write", name, lambda path: self._fs.pipe_file(path, content))

    def put(self, file: Path, name: str) -> None:
        """Upload a file."""
        options = self._put_options
        self._request("write", name, lambda path: self._fs.put_file(str(file), path, **options))

    def put_folder(self, folder: Path, name: str, *, last: Collection[str]) -> None:
        """Upload the files of a folder, those in `last` at the end."""
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for part in (files.difference(last), files.intersection(last)):
            in_parallel(lambda f: self.put(folder / f, f"{name}/{f}" if name else f), sorted(part))

    def get(self, name: str, file: Path, *, record: FileRecord) -> str | None:
        """Download an object into a new file; return its mistake or None."""
        for _ in range(NUM_TRIES):
            self._request("read", name, lambda path: self._fs.get_file(path, str(file)))
            mistakes = find_damage(file.parent, {file.name: record})
            if not mistakes:
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
                return None
        return f"{name}: {mistakes[0]}"

    def list(self, name: str = "") -> dict[str, int]:
        """Return the sizes of the objects below `name` by name, from a listing."""

        def find(path: str) -> dict[str, Any]:
            self._fs.invalidate_cache()
            return dict(self._fs.find(path, detail=True))

        objects = self._request("list", name, find) or {}
        return {path.removeprefix(f"{self._root}/"): o["size"] for path, o in objects.items()}

    def remove(self, names: Collection[str]) -> None:
        """Remove objects, if they exist."""
        in_parallel(lambda name: self._request("remove", name, self._fs.rm_file), names)


def in_parallel(action: Callable[[str], T], names: Collection[str]) -> list[T]:
    """Return the results of `action` for all names, a few at a time."""
    with ThreadPoolExecutor(NUM_FILES) as pool:
        return list(pool.map(action, names))


class RemoteCheckpoints:
    """Checkpoints of one run in a store, with copies on local disks. All methods are collective.

    `key` is the setting that holds the URL, `folder` the local parent of the `step-N` folders.
    Raises ConfigError if the package for such URLs is not installed.
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
        self._store = Store(url, key=key, timeout_seconds=settings.upload_timeout_seconds)
        self.url = self._store.url
        self._folder, self._group = folder, group
        self.disk = find_disk(folder, group=group)
        self._verifies = settings.verify_on_load
        process = f"process {os.getpid()} on host {platform.node()}"
        self._owner = f"{secrets.token_hex(8)} {process}".encode()
        self._damaged: set[str] = set()
        """Names of stored steps that are to be set aside."""

    def pull_newest(self) -> None:
        """Make the newest valid step, of the store and the disks, the newest one in both.

        A local step that is not in the store was written by a run that died before the upload. If a
        stored step is damaged, a local one replaces it. Raises CheckpointError if all steps are
        damaged, the store fails, or ranks see different stores.
        """
        self._take_over()
        on_each_disk(lambda: recover_commits(self._folder), group=self._group, disk=self.disk)
        stored, local = on_first_rank(
            lambda: (find_steps(self._store.list()), [n for n, _ in list_steps(self._folder)]),
            group=self._group,
        )
        damaged = []
        for step in sorted({*stored, *local}, reverse=True):
            name = f"step-{step}"
            if stored.get(step) and self._pull(name):
                break
            if step in local and self._is_whole(name):
                self.push(name)
                if len(self.disk) < self._group.size():
                    self._pull(name)  # a disk has only the files of its ranks
                break
            damaged.append(name)
        else:
            if damaged:
                raise CheckpointError(
                    f"all checkpoints in {self.url} and {self._folder} are damaged: "
                    f"{', '.join(damaged[:8])}; restore one from a copy, or choose other folders"
                )
            return
        self._damaged = {*damaged}  # `prune` sets them aside, once this run has saved
        later = partial(set_aside_after, self._folder, step, except_step=step)
        on_each_disk(later, group=self._group, disk=self.disk)

    def _take_over(self) -> None:
        """Make this run the owner of the store, and check that all ranks see the same store."""

        def write() -> bytes:
            self._store.write(OWNER, self._owner)
            return self._owner

        self._owner = on_first_rank(write, group=self._group)
        seen = on_every_rank(lambda: self._store.read(OWNER) == self._owner, group=self._group)
        if not all(seen):
            raise CheckpointError(
                f"checkpoint.folder {self.url} must be one store for all ranks, and rank "
                f"{seen.index(False)} does not see what rank 0 wrote"
            )

    def _check_owner(self) -> None:
        """Raise CheckpointError if another run took the store over."""
        owner = self._store.read(OWNER) or b""
        if owner != self._owner:
            raise CheckpointError(
                f"{self.url} must belong to one run at a time, and another run took it over: "
                f"{owner.decode(errors='replace').partition(' ')[2] or 'unknown'}; end one of "
                f"them, or choose another checkpoint.folder"
            )

    def _share(self, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Return this rank's share of the files on its disk."""
        rank = self.disk.index(self._group.rank())
        return share_files(files, rank=rank, num_ranks=len(self.disk))

    def _warn_of_damage(self, location: Path | str, mistakes: list[str]) -> None:
        if self._group.rank() == 0:
            logger.warning("%s is damaged and is not used: %s", location, summarize(mistakes))

    def _is_whole(self, name: str) -> bool:
        """Return whether the disks hold all files of a step, undamaged."""
        folder = self._folder / name
        mistakes = verify(folder, group=self._group, disk=self.disk, hashes=self._verifies)
        if mistakes:
            self._warn_of_damage(folder, mistakes)
        return not mistakes

    def _pull(self, name: str) -> bool:
        """Download a step to each disk that lacks it; return False if the stored one is damaged."""
        read = partial(self._store.read, f"{name}/{MANIFEST}")
        content = on_first_rank(read, group=self._group) or b""
        manifest = parse_stored(content, name=name)
        if manifest is None:
            self._warn_of_damage(f"{self.url}/{name}", [f"{MANIFEST} is missing or damaged"])
            return False
        target, files = self._folder / name, list_files(manifest)
        draft, mine = draft_of(target), self._share(files)

        def is_here() -> bool:
            local = target / MANIFEST
            is_same = local.is_file() and local.read_bytes() == content
            return is_same and not find_damage(target, mine, hashes=self._verifies)

        def open_draft() -> None:
            if lacks:
                make_draft(target, sorted({str(Path(file).parent) for file in files}))

        def fetch(file: str) -> str | None:
            source = f"{name}/{manifest['checksum']}/{file}"
            return self._store.get(source, draft / file, record=files[file])

        def close_draft() -> None:
            if lacks:
                write_bytes(draft / MANIFEST, content)
                commit(target)

        whole = on_every_rank(is_here, group=self._group)
        lacks = not all(whole[rank] for rank in self.disk)
        if lacks and self._group.rank() == 0:
            logger.info("Fetching %s/%s into %s", self.url, name, target)
        on_each_disk(open_draft, group=self._group, disk=self.disk)
        results = on_every_rank(
            lambda: in_parallel(fetch, mine) if lacks else [], group=self._group
        )
        if mistakes := sorted({mistake for part in results for mistake in part if mistake}):
            self._warn_of_damage(f"{self.url}/{name}", mistakes)
            return False
        on_each_disk(close_draft, group=self._group, disk=self.disk)
        return True

    def fetch(self, load_step: int) -> Path:
        """Download `load_step` (-1: the newest valid step) from a store of another run.

        Returns:
            The folder of the local copy.

        Raises CheckpointError if the store has no valid checkpoint, or the named one is damaged.
        """
        stored = on_first_rank(lambda: find_steps(self._store.list()), group=self._group)
        steps = [step for step, is_committed in stored.items() if is_committed]
        for step in reversed(steps if load_step == -1 else [load_step]):
            if self._pull(f"step-{step}"):
                return self._folder / f"step-{step}"
        raise CheckpointError(
            f"{self.url} must hold a valid checkpoint of this library"
            + ("" if load_step == -1 else f" of step {load_step}")
            + f", and has the steps {', '.join(map(str, steps)) or 'none'}"
        )

    def push(self, name: str) -> None:
        """Upload the local checkpoint `name`, its manifest last; raise CheckpointError if a file is
        missing, the store failed, or another run took it over."""
        folder = self._folder / name

        def start() -> StoredJSON:
            self._check_owner()
            return read_manifest(folder)

        manifest = on_first_rank(start, group=self._group)
        present = {n: r for n, r in list_files(manifest).items() if (folder / n).is_file()}
        files, attempt = self._share(present), f"{name}/{manifest['checksum']}"
        on_every_rank(
            lambda: in_parallel(
                lambda file: self._store.put(folder / file, f"{attempt}/{file}"), files
            ),
            group=self._group,
        )
        on_first_rank(lambda: self._commit(name, manifest), group=self._group)
        self._damaged.discard(name)
        logger.info("Saved %s/%s", self.url, name)

    def _commit(self, name: str, manifest: StoredJSON) -> None:
        """Write the manifest of a step after checking the size of each file in the store."""
        attempt, objects = f"{name}/{manifest['checksum']}", self._store.list(name)
        sizes = {f"{attempt}/{file}": record.size for file, record in list_files(manifest).items()}
        missing = [path for path, size in sizes.items() if objects.get(path) != size]
        if missing:
            raise CheckpointError(
                f"{self.url}/{name} cannot be committed: it lacks {summarize(missing)}, or they "
                f"have other sizes; run the same command again"
            )
        self._check_owner()
        self._store.write(f"{name}/{MANIFEST}", manifest.path.read_bytes())
        self._store.remove(objects.keys() - sizes.keys() - {f"{name}/{MANIFEST}"})

    def push_export(self, name: str) -> None:
        """Upload a Hugging Face folder, its config last; raise CheckpointError on failure."""
        folder = self._folder / name
        on_first_rank(
            lambda: self._store.put_folder(folder, name, last=WHOLE_EXPORT), group=self._group
        )
        logger.info("Saved %s/%s", self.url, name)

    def prune(self, steps_to_delete: StepsToDelete) -> None:
        """Delete the steps that `steps_to_delete` selects, and files that no step names."""
        on_first_rank(lambda: self._prune(steps_to_delete), group=self._group)

    def _prune(self, steps_to_delete: StepsToDelete) -> None:
        def manifest_of(step: int) -> StoredJSON | None:
            content = self._store.read(f"step-{step}/{MANIFEST}")
            return parse_stored(content or b"", name=f"step-{step}")

        try:
            self._check_owner()
            for name in sorted(self._damaged):
                self._mark_damaged(name)
            self._damaged.clear()
            objects = self._store.list()
            steps = find_steps(objects)
            committed = [step for step, is_committed in steps.items() if is_committed]
            deleted = steps_to_delete(committed, manifest_of)
            self._store.remove([f"step-{step}/{MANIFEST}" for step in deleted])  # first
            kept = {f"step-{step}" for step in steps.keys() - {*deleted}}
            folders = {name: name.partition("/")[0] for name in objects}
            self._store.remove(
                [
                    name
                    for name, folder in folders.items()
                    if step_of(PurePath(folder)) is not None and folder not in kept
                ]
            )
        except CheckpointError as error:
            # the newest checkpoints are committed
            logger.warning("Could not prune %s; the next save tries again: %s", self.url, error)

    def _mark_damaged(self, name: str) -> None:
        """Rename the manifest of a damaged step; keep its files."""
        if content := self._store.read(f"{name}/{MANIFEST}"):
            self._store.write(f"{name}/{DAMAGED}", content)
            self._store.remove([f"{name}/{MANIFEST}"])
            logger.warning("%s/%s is damaged and was set aside", self.url, name)


def find_steps(names: Iterable[str]) -> dict[int, bool]:
    """Return the steps among the names of objects, ascending: whether each is committed, or else
    damaged."""
    steps: dict[int, bool] = {}
    for name in names:
        folder, _, file = name.partition("/")
        step = step_of(PurePath(folder))
        if step is not None and file in (MANIFEST, DAMAGED):
            steps[step] = steps.get(step, False) or file == MANIFEST
    return dict(sorted(steps.items()))


def parse_stored(content: bytes, *, name: str) -> StoredJSON | None:
    """Return the manifest of a step in a store; None if it is missing or damaged."""
    try:
        manifest = parse_manifest(content, path=Path(name, MANIFEST))
        list_files(manifest)
    except CheckpointError:
        return None
    return manifest
