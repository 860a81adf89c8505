"""Check the checkpoint folder and the data on each machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.device import GIB
from torchtitan.base.log import plural
from torchtitan.base.urls import is_url
from torchtitan.data.files import find_files
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import Config
from torchtitan.tools.check.ranks import Checked, Failed, Finding, Ranks, attempt, usual
from torchtitan.validate import validation_source

BLOCK, WRITTEN = 2**20, 64 * 2**20
"""Bytes per write, and in total."""
HEAD = 2**16
"""Bytes at each end of a data file that are compared, with its size."""
SLOW = 0.1
"""Part of the usual write rate below which a disk is slow; caches make rates vary."""
SECONDS_TO_SEE = 5.0
"""Longest time until a shared folder shows a new file; NFS caches for a few seconds."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and two moments in float32."""


@dataclass(frozen=True)
class Disk:
    """A folder, as one machine sees it."""

    free: int
    """Bytes."""
    rate: float
    """Bytes written per second, with fsync."""
    is_shared: bool
    """Whether rank 0's file is visible."""


def check_checkpoints(ranks: Ranks, config: Config, *, num_parameters: int) -> Checked:
    """Write to the checkpoint folder from all machines at once."""
    folder = Path(config.job.dump_folder)
    if config.checkpoint.enable:
        folder /= config.checkpoint.local_folder
    seen = folder / f".check-{os.getpid()}"
    names = [str(seen)]
    if ranks.launch.rank == 0:
        attempt(lambda: _touch(seen))  # a failure is reported below
    dist.broadcast_object_list(names)
    answer = attempt(lambda: _try(folder, Path(names[0]))) if ranks.is_first else None
    answers = ranks.gather_first(answer)
    attempt(lambda: seen.unlink(missing_ok=True))
    needed = BYTES_PER_PARAMETER * num_parameters if config.checkpoint.enable else 0
    findings, disks = [], {}
    for machine, disk in answers.items():
        if isinstance(disk, Disk):
            disks[machine] = disk
            continue
        assert isinstance(disk, Failed)
        findings.append(
            Finding(
                f"every machine must be able to write to {folder}, {machine} cannot: {disk.why}",
                "choose a job.dump_folder on storage that all machines can write to",
            )
        )
    if disks:
        # for an object store, each machine uploads from its own disk
        must_share = not is_url(config.checkpoint.folder)
        findings += _compare(disks, folder=folder, needed=needed, must_share=must_share)
    summary = f"{folder}: not writable"
    if disks:
        free, rate = (min(getattr(d, name) for d in disks.values()) for name in ("free", "rate"))
        summary = f"{folder}: {free / GIB:.1f} GiB free, written at {rate / 1e6:.0f} MB/s"
    figures = {machine: disk.__dict__ for machine, disk in disks.items()}
    return Checked(name="checkpoints", summary=summary, figures=figures, findings=findings)


def _compare(
    disks: dict[str, Disk], *, folder: Path, needed: int, must_share: bool
) -> list[Finding]:
    findings, most = [], usual([disk.rate for disk in disks.values()])
    for machine, disk in disks.items():
        if disk.free < needed:
            findings.append(
                Finding(
                    f"a checkpoint of this job takes about {needed / GIB:.1f} GiB, and "
                    f"{disk.free / GIB:.1f} GiB are free in {folder} on {machine}",
                    "free some space, or choose another job.dump_folder; checkpoint.keep_latest_k "
                    "limits the number of checkpoints",
                )
            )
        if must_share and not disk.is_shared:
            findings.append(
                Finding(
                    f"{folder} must be one folder for all machines, {machine} does not see the "
                    "file of rank 0",
                    "choose a job.dump_folder on storage that is mounted on all machines",
                )
            )
        if disk.rate < SLOW * most:
            findings.append(
                Finding(
                    f"{machine} writes to {folder} at {disk.rate / 1e6:.0f} MB/s, "
                    f"{most / 1e6:.0f} MB/s are usual",
                    "check its mount and its network; each save waits for the slowest machine",
                )
            )
    return findings


def _touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _try(folder: Path, seen: Path) -> Disk:
    """Write a temporary file in `folder`, and wait until `seen` is visible."""
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(BLOCK)  # cannot be compressed
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
        started = time.perf_counter()
        for _ in range(WRITTEN // BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = WRITTEN / (time.perf_counter() - started)
    deadline = time.monotonic() + SECONDS_TO_SEE
    while not (is_shared := seen.name in os.listdir(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return Disk(shutil.disk_usage(folder).free, rate, is_shared)


def check_data(ranks: Ranks, config: Config) -> Checked:
    """Compare the tokenizer, and size and ends of the data files, between machines."""
    found = attempt(lambda: list_data(config)) if ranks.is_first else None
    told = [found]
    dist.broadcast_object_list(told)
    answer: Failed | list[str] | None = None
    if isinstance(found, dict):
        usual_one = told[0] if isinstance(told[0], dict) else found
        names = usual_one.keys() | found.keys()
        answer = sorted(name for name in names if usual_one.get(name) != found.get(name))
    elif found is not None:
        answer = found
    findings = []
    for machine, differing in ranks.gather_first(answer).items():
        if isinstance(differing, Failed):
            findings.append(
                Finding(
                    f"every machine must be able to read the data, {machine} cannot: "
                    f"{differing.why}",
                    "copy or mount the same files there, under the same path",
                )
            )
        elif differing:
            findings.append(
                Finding(
                    f"all machines must read the same data, {machine} sees "
                    f"{plural(len(differing), 'file')} otherwise than rank 0, first {differing[0]}",
                    "copy the files again, or mount one storage on all machines",
                )
            )
    num = len(told[0]) - 1 if isinstance(told[0], dict) else 0
    summary = f"{plural(num, 'file')} and the tokenizer" if num else "the tokenizer; no file"
    return Checked(name="data", summary=summary, figures={"files": num}, findings=findings)


def list_data(config: Config) -> dict[str, str]:
    """Return the hash of each data file of the job, and of the tokenizer."""
    found = {"the tokenizer": build_tokenizer(config.model.tokenizer_path).fingerprint}
    sources = {"training": config.training}
    if config.validation.enable and config.validation.holdout_fraction is None:
        sources["validation"] = validation_source(config.training, config.validation)
    for section, source in sources.items():
        for pattern in source.paths:
            key, cache = f"{section}.dataset_path", config.training.dataset_cache
            files = find_files(pattern, key=key, cache=cache)
            found |= {str(file): _hash(file) for file in files}
    return found


def _hash(file: Path) -> str:
    """Return a hash of a file's size and ends; for the index of a token store, also its tokens'."""
    files = [file, file.with_suffix(".bin")] if file.suffix == ".idx" else [file]
    found = hashlib.sha256()
    for one in files:
        size = one.stat().st_size
        with one.open("rb") as opened:
            found.update(f"{size}".encode() + opened.read(HEAD))
            opened.seek(max(0, size - HEAD))
            found.update(opened.read(HEAD))
    return found.hexdigest()
