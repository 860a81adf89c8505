"""What a machine reads and writes: the folder of the checkpoints, and the data."""

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
"""Bytes written at a time, and in all."""
HEAD = 2**16
"""Bytes at each end of a data file that are compared, beside its size."""
SLOW = 0.1
"""Of the usual rate to write, what counts as slow: disks have caches, and neighbours."""
SECONDS_TO_SEE = 5.0
"""How long a shared folder may take to show a new file: NFS asks again after a few seconds."""
OF_A_PARAMETER = 12
"""Bytes of a checkpoint: the weight and two moments in float32."""


@dataclass(frozen=True)
class Disk:
    """What a folder offers one machine."""

    free: int
    """Bytes."""
    rate: float
    """Bytes/s written, synchronised."""
    is_shared: bool
    """Whether rank 0's file is seen there."""


def check_checkpoints(ranks: Ranks, config: Config, *, num_parameters: int) -> Checked:
    """Write to the folder of the checkpoints from all machines at once."""
    folder = Path(config.job.dump_folder)
    if config.checkpoint.enable:
        folder /= config.checkpoint.local_folder
    seen = folder / f".check-{os.getpid()}"
    names = [str(seen)]
    if ranks.launch.rank == 0:
        attempt(lambda: _touch(seen))  # whether it can is found below
    dist.broadcast_object_list(names)
    answer = attempt(lambda: _try(folder, Path(names[0]))) if ranks.is_first else None
    answers = ranks.gather_first(answer)
    attempt(lambda: seen.unlink(missing_ok=True))  # which failed already, if it fails
    needed = OF_A_PARAMETER * num_parameters if config.checkpoint.enable else 0
    findings, disks = [], {}
    for machine, disk in answers.items():
        if isinstance(disk, Disk):
            disks[machine] = disk
            continue
        assert isinstance(disk, Failed)
        findings.append(
            Finding(
                what=f"every machine must be able to write to {folder}, {machine} cannot: "
                f"{disk.why}",
                remedy="give a job.dump_folder on storage that all machines share and may write to",
            )
        )
    if disks:
        may_part = is_url(config.checkpoint.folder)  # each machine uploads from its own disk
        findings += _compare(disks, folder=folder, needed=needed, must_share=not may_part)
    summary = f"{folder}: nowhere written"
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
                    what=f"a checkpoint of this job takes about {needed / GIB:.1f} GiB, and "
                    f"{disk.free / GIB:.1f} GiB are free in {folder} on {machine}",
                    remedy="free some space, or give another job.dump_folder; "
                    "checkpoint.keep_latest_k tells how many are kept",
                )
            )
        if must_share and not disk.is_shared:
            findings.append(
                Finding(
                    what=f"{folder} must be one folder for all machines, {machine} does not see "
                    "what rank 0 has written there",
                    remedy="mount the same storage everywhere, and give a folder on it as "
                    "job.dump_folder",
                )
            )
        if disk.rate < SLOW * most:
            findings.append(
                Finding(
                    what=f"{machine} writes to {folder} at {disk.rate / 1e6:.0f} MB/s, "
                    f"{most / 1e6:.0f} MB/s are usual",
                    remedy="look at its mount and its network; each save waits for the slowest",
                )
            )
    return findings


def _touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _try(folder: Path, seen: Path) -> Disk:
    """Write a file in `folder`, which is removed again."""
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(BLOCK)  # a file system that compresses gains nothing
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
    """Compare the data files, and the tokenizer, as each machine sees them: sizes and ends."""
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
                    what=f"every machine must be able to read the data, {machine} cannot: "
                    f"{differing.why}",
                    remedy="copy or mount the same files there, under the same path",
                )
            )
        elif differing:
            findings.append(
                Finding(
                    what=f"all machines must read the same data, {machine} sees "
                    f"{plural(len(differing), 'file')} otherwise than rank 0, first {differing[0]}",
                    remedy="copy the files again, or mount one storage everywhere",
                )
            )
    num = len(told[0]) - 1 if isinstance(told[0], dict) else 0
    summary = f"{plural(num, 'file')} and the tokenizer" if num else "the tokenizer; no file"
    return Checked(name="data", summary=summary, figures={"files": num}, findings=findings)


def list_data(config: Config) -> dict[str, str]:
    """Return the data files of the job with a hash of each, and of the tokenizer."""
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
    """Return a hash of the size and both ends of a file; of a token store, of its tokens' too."""
    files = [file, file.with_suffix(".bin")] if file.suffix == ".idx" else [file]
    found = hashlib.sha256()
    for one in files:
        size = one.stat().st_size
        with one.open("rb") as opened:
            found.update(f"{size}".encode() + opened.read(HEAD))
            opened.seek(max(0, size - HEAD))
            found.update(opened.read(HEAD))
    return found.hexdigest()
