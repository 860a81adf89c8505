"""Checkpoints of a run in an object store, by fsspec.

With a URL as `checkpoint.folder`, each checkpoint is first saved to a local folder and then
uploaded; it counts as saved once it is in the store.

    s3://bucket/run/step-20/3f9c21d0/model/__0_0.distcp ...   the files of one attempt to upload
    s3://bucket/run/step-20/manifest.json                     written last: names the attempt
    s3://bucket/run/.owner                                    the run that may commit

A store has no rename, so the manifest commits a checkpoint: rank 0 writes it after a listing shows
the files of all ranks with their sizes, and removes it first to delete the checkpoint. The next
start uploads a checkpoint that was not uploaded when the run died.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import torch.distributed as dist

from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.base.files import StoredJSON, parse_json
from torchtitan.base.urls import missing_package, url_problem, without_secrets
from torchtitan.checkpoint.checksums import (
    MANIFEST,
    FileRecord,
    find_damage,
    is_sealed,
    list_files,
    seal,
    share_files,
    summarize,
    write_bytes,
)
from torchtitan.checkpoint.retention import Retention
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import (
    STEP_NAME,
    commit,
    draft_of,
    find_disks,
    list_steps,
    make_draft,
    on_each_disk,
    recover_commits,
    set_aside_after,
)
from torchtitan.mesh.ranks import on_every_rank, on_first_rank, reason

T = TypeVar("T")
logger = logging.getLogger(__name__)
OWNER, ASIDE, ATTEMPT = ".owner", f"{MANIFEST}.aside", "attempt"
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
    """The objects below a URL, whose requests are repeated.

    Raises:
        ConfigError: The scheme of `url`, the value of the setting `key`, is not supported, or its
            package is not installed.
    """

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

    def _request(self, verb: str, name: str, action: Callable[[], T]) -> T | None:
        """Repeat `action` until it succeeds; return its result, None for an object that is missing.

        Raises:
            CheckpointError: The error is permanent, or the timeout has passed.
        """
        began = time.monotonic()
        for number in itertools.count():
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - each store's client has classes of its own
                if isinstance(error, FileNotFoundError) and verb != "write":
                    return None
                spent, failure = time.monotonic() - began, without_secrets(reason(error))
                is_final = (
                    isinstance(error, _FINAL)
                    or _FINAL_BY_NAME.search(type(error).__name__) is not None
                    or (isinstance(error, OSError) and error.errno == errno.ENOSYS)
                )
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
        return self._request("read", name, lambda: bytes(self._fs.cat_file(self._path(name))))

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._request("write", name, lambda: self._fs.pipe_file(self._path(name), content))

    def put(self, file: Path, name: str) -> None:
        """Upload a file."""
        path, options = self._path(name), self._put_options
        self._request("write", name, lambda: self._fs.put_file(str(file), path, **options))

    def put_folder(self, folder: Path, name: str, *, last: Collection[str]) -> None:
        """Upload the files of a folder, those in `last` at the end."""
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for part in (files.difference(last), files.intersection(last)):
            in_parallel(lambda f: self.put(folder / f, f"{name}/{f}" if name else f), sorted(part))

    def get(self, name: str, file: Path, *, record: FileRecord) -> str | None:
        """Download an object into a new file; return its mistake or None."""
        path = self._path(name)
        for _ in range(NUM_TRIES):
            self._request("read", name, lambda: self._fs.get_file(path, str(file)))
            mistakes = find_damage(file.parent, {file.name: record})
            if not mistakes:
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
                return None
        return f"{name}: {mistakes[0]}"

    def list(self, name: str = "") -> dict[str, int]:
        """Return the sizes of the objects below `name` by name, from a listing."""

        def find() -> dict[str, Any]:
            self._fs.invalidate_cache()
            return dict(self._fs.find(self._path(name), detail=True))

        objects = self._request("list", name, find) or {}
        return {path.removeprefix(f"{self._root}/"): o["size"] for path, o in objects.items()}

    def remove(self, names: Collection[str]) -> None:
        """Remove objects, if they exist."""
        in_parallel(
            lambda n: self._request("remove", n, lambda: self._fs.rm_file(self._path(n))), names
        )


def in_parallel(action: Callable[[str], T], names: Collection[str]) -> list[T]:
    """Return the results of `action` for all names, a few at a time."""
    with ThreadPoolExecutor(NUM_FILES) as pool:
        return list(pool.map(action, names))


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
        self._store = Store(url, key=key, timeout_seconds=settings.upload_timeout_seconds)
        self.url = self._store.url
        self._folder, self._group = folder, group
        self.disk = find_disks(folder, group=group, timeout_seconds=settings.save_timeout_seconds)
        """Ranks that share this rank's disk. None: all of `group`."""
        self._verifies = settings.verify_on_load
        process = f"process {os.getpid()} on host {platform.node()}"
        self._owner = f"{secrets.token_hex(8)} {process}".encode()
        self._damaged: set[str] = set()

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
        for step in reversed([step for step, _ in local if step > max(stored, default=-1)]):
            if self._finish_upload(step):
                stored.append(step)
                break
        for step in reversed(stored):
            mistakes = self.pull(f"step-{step}")
            if mistakes:
                self._damaged.add(f"step-{step}")
                self._warn_of_damage(f"{self.url}/step-{step}", mistakes)
            # a kill may have ended the upload that replaces a damaged step
            is_local = step in [n for n, _ in local]
            if not mistakes or (is_local and self._finish_upload(step)):
                later = partial(set_aside_after, self._folder, step, except_step=step)
                on_each_disk(later, group=self._group, disk=self.disk)
                return
        if stored or local:
            raise CheckpointError(
                f"all checkpoints in {self.url} ({len(stored)}) and {self._folder} ({len(local)}) "
                f"are damaged; restore one from a copy, or choose other folders"
            )

    def _take_over(self) -> None:
        """Make this run the owner of the store, and check that all ranks see the same store."""

        def write() -> bytes:
            self._store.write(OWNER, self._owner)
            return self._owner

        self._owner = on_first_rank(write, group=self._group)
        seen = on_every_rank(lambda: self._store.read(OWNER) == self._owner, group=self._group)
        if apart := [str(rank) for rank, is_same in enumerate(seen) if not is_same]:
            raise CheckpointError(
                f"checkpoint.folder {self.url} must be one store for all ranks, and ranks "
                f"{', '.join(apart)} do not see what rank 0 wrote"
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

    def _finish_upload(self, step: int) -> bool:
        """Upload a local step that an earlier start did not; return False if it is damaged."""
        folder = self._folder / f"step-{step}"
        manifest = on_first_rank(lambda: read_sealed(folder), group=self._group)
        mistakes = [f"{MANIFEST} is missing or damaged"]
        if manifest is not None:
            files = list_files(manifest)
            mine = self._share_present(folder, files)
            checks = on_every_rank(
                lambda: ([*mine], find_damage(folder, mine, hashes=self._verifies)),
                group=self._group,
            )
            missing = files.keys() - {name for names, _ in checks for name in names}
            mistakes = [f"{name} is missing" for name in sorted(missing)]
            mistakes += sorted({mistake for _, part in checks for mistake in part})
        if mistakes:
            self._warn_of_damage(folder, mistakes)
            return False
        self.push(folder.name)
        return True

    def _warn_of_damage(self, location: Path | str, mistakes: list[str]) -> None:
        if dist.get_rank(self._group) == 0:
            logger.warning("%s is damaged and is not used: %s", location, summarize(mistakes))

    def _share(self, files: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        """Return this rank's share of the files on its disk."""
        disk = self.disk or self._group
        return share_files(files, rank=dist.get_rank(disk), num_ranks=dist.get_world_size(disk))

    def _share_present(
        self, folder: Path, files: Mapping[str, FileRecord]
    ) -> dict[str, FileRecord]:
        """Return this rank's share of the files that exist on its disk."""
        return self._share({n: record for n, record in files.items() if (folder / n).is_file()})

    def pull(self, name: str) -> list[str]:
        """Download a checkpoint to each disk that lacks it; return mistakes in the stored one."""
        stored = on_first_rank(lambda: read_commit(self._store, name), group=self._group)
        if stored is None:
            return [f"{MANIFEST} is missing or damaged"]
        manifest = {k: v for k, v in stored.items() if k not in (ATTEMPT, "checksum")}
        target, files = self._folder / name, list_files(stored)
        draft, mine = draft_of(target), self._share(files)

        def is_whole() -> bool:
            local = read_sealed(target)
            is_same = local is not None and seal(manifest) == (target / MANIFEST).read_bytes()
            return is_same and not find_damage(target, mine, hashes=self._verifies)

        disk = self.disk or self._group
        whole = on_every_rank(is_whole, group=self._group)
        is_here = all(whole[rank] for rank in dist.get_process_group_ranks(disk))
        if not is_here and dist.get_rank(self._group) == 0:
            logger.info("Fetching %s/%s into %s", self.url, name, target)

        def open_draft() -> None:
            if not is_here:
                make_draft(target, sorted({str(Path(file).parent) for file in files}))

        def fetch(file: str) -> str | None:
            source = f"{name}/{stored[ATTEMPT]}/{file}"
            return self._store.get(source, draft / file, record=files[file])

        def close_draft() -> None:
            if not is_here:
                write_bytes(draft / MANIFEST, seal(manifest))
                commit(target)

        on_each_disk(open_draft, group=self._group, disk=self.disk)
        fetched = on_every_rank(
            lambda: [] if is_here else in_parallel(fetch, mine), group=self._group
        )
        if mistakes := sorted({mistake for part in fetched for mistake in part if mistake}):
            return mistakes
        on_each_disk(close_draft, group=self._group, disk=self.disk)
        return []

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
            self._warn_of_damage(f"{self.url}/{target.name}", mistakes)
        raise CheckpointError(
            f"{self.url} must hold a valid checkpoint of this library"
            + ("" if load_step == -1 else f" of step {load_step}")
            + f", and has the steps {', '.join(map(str, steps)) or 'none'}"
        )

    def push(self, name: str) -> None:
        """Upload the local checkpoint `name`, its manifest last, unless it is in the store.

        Raises:
            CheckpointError: A file is missing, the store failed, or another run took it over.
        """
        folder = self._folder / name

        def open_attempt() -> tuple[StoredJSON, str | None]:
            self._check_owner()
            manifest, stored = read_sealed(folder), read_commit(self._store, name)
            if manifest is None:
                raise CheckpointError(f"{folder} has no valid {MANIFEST}, and cannot be uploaded")
            is_there = stored is not None and stored["files"] == manifest["files"]
            is_there = is_there and name not in self._damaged
            return manifest, None if is_there else secrets.token_hex(4)

        manifest, attempt = on_first_rank(open_attempt, group=self._group)
        if attempt is not None:
            files = self._share_present(folder, list_files(manifest))
            on_every_rank(
                lambda: in_parallel(
                    lambda file: self._store.put(folder / file, f"{name}/{attempt}/{file}"), files
                ),
                group=self._group,
            )
            on_first_rank(lambda: self._commit(name, manifest, attempt), group=self._group)
            self._damaged.discard(name)
        logger.info("Saved %s/%s", self.url, name)

    def _commit(self, name: str, manifest: StoredJSON, attempt: str) -> None:
        """Write the manifest of a checkpoint after checking the size of each file in the store."""
        objects = self._store.list(name)
        missing = [
            f"{file} is missing or has another size"
            for file, record in list_files(manifest).items()
            if objects.get(f"{name}/{attempt}/{file}") != record.size
        ]
        if missing:
            raise CheckpointError(
                f"{self.url}/{name} cannot be committed: {summarize(missing)}; run the same "
                f"command again"
            )
        content = {k: v for k, v in manifest.items() if k != "checksum"}
        self._check_owner()
        self._store.write(f"{name}/{MANIFEST}", seal({ATTEMPT: attempt, **content}))
        used = (f"{name}/{attempt}/", f"{name}/{MANIFEST}")
        self._store.remove([path for path in objects if not path.startswith(used)])

    def push_export(self, name: str) -> None:
        """Upload a Hugging Face folder, its config last; raise CheckpointError on failure."""
        folder = self._folder / name
        on_first_rank(
            lambda: self._store.put_folder(folder, name, last=WHOLE_EXPORT), group=self._group
        )
        logger.info("Saved %s/%s", self.url, name)

    def prune(self, saved: int, retention: Retention) -> None:
        """After the upload of step `saved`, delete steps that are not retained and files of steps
        that were never committed, and set damaged steps aside."""
        on_first_rank(lambda: self._prune(saved, retention), group=self._group)
        self._damaged.clear()

    def _prune(self, saved: int, retention: Retention) -> None:
        def manifest_of(step: int) -> Mapping[str, Any]:
            manifest = read_commit(self._store, f"step-{step}")
            if manifest is None:
                raise CheckpointError(f"{self.url}/step-{step}/{MANIFEST} is missing or damaged")
            return manifest

        try:
            for name in self._damaged - {f"step-{saved}"}:
                self._set_aside(name)
            steps = find_steps(self._store)
            for step in retention.steps_to_delete(steps, manifest_of=manifest_of):
                self._delete(f"step-{step}")
            for name, names in group_by_step(self._store.list()).items():
                if not {f"{name}/{MANIFEST}", f"{name}/{ASIDE}"} & names:
                    self._store.remove(names)
        except CheckpointError as error:
            # the newest checkpoints are committed
            logger.warning("Could not prune %s; the next save tries again: %s", self.url, error)

    def _set_aside(self, name: str) -> None:
        """Rename the manifest of a damaged checkpoint; keep its files."""
        if content := self._store.read(f"{name}/{MANIFEST}"):
            self._store.write(f"{name}/{ASIDE}", content)
            self._store.remove([f"{name}/{MANIFEST}"])
            logger.warning("%s/%s is damaged and was set aside", self.url, name)

    def _delete(self, name: str) -> None:
        """Delete a checkpoint, its manifest first."""
        self._store.remove([f"{name}/{MANIFEST}"])
        self._store.remove(self._store.list(name).keys())


def read_sealed(folder: Path) -> StoredJSON | None:
    """Return the manifest of a local checkpoint; None if it is missing or damaged."""
    path = folder / MANIFEST
    content = path.read_bytes() if path.is_file() else b""
    return parse_json(content, path=path) if is_sealed(content) else None


def read_commit(store: Store, name: str) -> StoredJSON | None:
    """Return the manifest of a checkpoint in a store; None if it is missing or damaged."""
    content = store.read(f"{name}/{MANIFEST}") or b""
    if not is_sealed(content):
        return None
    manifest = parse_json(content, path=Path(f"{name}/{MANIFEST}")).check_types({ATTEMPT: str})
    return manifest if re.fullmatch(r"[0-9a-f]+", manifest[ATTEMPT]) else None


def group_by_step(names: Collection[str]) -> dict[str, set[str]]:
    """Return the names of objects by their folder `step-N`."""
    steps: dict[str, set[str]] = {}
    for name in names:
        folder = name.partition("/")[0]
        if STEP_NAME.fullmatch(folder):
            steps.setdefault(folder, set()).add(name)
    return steps


def find_steps(store: Store) -> list[int]:
    """Return the committed steps, ascending."""
    steps = group_by_step(store.list())
    return sorted(
        int(name.removeprefix("step-"))
        for name, names in steps.items()
        if f"{name}/{MANIFEST}" in names
    )
