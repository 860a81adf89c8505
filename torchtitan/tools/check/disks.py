"""Check the checkpoint folder and the data on each machine."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.device import GIB
from torchtitan.base.log import plural
from torchtitan.base.urls import is_url
from torchtitan.data.files import find_files
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import Config
from torchtitan.tools.check.ranks import Checked, Failed, Ranks, attempt
from torchtitan.validate import validation_source

WRITTEN = 4 * 2**20
"""Bytes that each machine writes, more than an exhausted quota has."""
HEAD = 2**16
"""Bytes at each end of a data file that are compared, with its size."""
SECONDS_TO_SEE = 5.0
"""Longest time until a shared folder shows a new file; NFS caches for a few seconds."""
BYTES_PER_PARAMETER = 12
"""Of a checkpoint: the weight and two moments in float32."""


def check_checkpoints(ranks: Ranks, config: Config, *, num_parameters: int) -> Checked:
    """Write to the checkpoint folder from all machines."""
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
    faults, least = [], None
    for machine, reply in answers.items():
        if isinstance(reply, Failed):
            faults.append(
                f"every machine must be able to write to {folder}, {machine} cannot: {reply.why}"
            )
            continue
        assert reply is not None, "the first rank of a machine answers"
        free, is_shared = reply
        least = free if least is None else min(least, free)
        if free < needed:
            faults.append(
                f"a checkpoint of this job takes at most about {needed / GIB:.1f} GiB, and "
                f"{free / GIB:.1f} GiB are free in {folder} on {machine}"
            )
        # for an object store, each machine uploads from its own disk
        if not is_shared and not is_url(config.checkpoint.folder):
            faults.append(
                f"{folder} must be one folder for all machines, {machine} does not see the file "
                f"of rank 0"
            )
    state = "not writable" if least is None else f"{least / GIB:.1f} GiB free"
    state += f", a checkpoint takes at most about {needed / GIB:.3g} GiB" if needed else ""
    return Checked(name="checkpoints", summary=f"{folder}: {state}", faults=faults)


def _touch(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def _try(folder: Path, seen: Path) -> tuple[int, bool]:
    """Write a temporary file in `folder`; return the free bytes, and whether `seen` is visible."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
        file.write(os.urandom(WRITTEN))  # cannot be compressed
        file.flush()
        os.fsync(file.fileno())
    deadline = time.monotonic() + SECONDS_TO_SEE
    while not (is_shared := seen.name in os.listdir(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return shutil.disk_usage(folder).free, is_shared


def check_data(ranks: Ranks, config: Config) -> Checked:
    """Compare the tokenizer, and size and ends of the data files, between machines."""
    answers = ranks.gather_first(attempt(lambda: list_data(config)) if ranks.is_first else None)
    faults: list[str] = []
    first: dict[str, str] = {}
    for machine, answer in answers.items():
        if isinstance(answer, Failed):
            faults.append(f"every machine must be able to read the data, {machine}: {answer.why}")
            continue
        assert answer is not None, "the first rank of a machine answers"
        first = first or answer
        names = sorted(k for k in {**first, **answer} if first.get(k) != answer.get(k))
        if names:
            differ = "differs from that" if len(names) == 1 else "differ from those"
            faults.append(
                f"all machines must read the same data; on {machine}, "
                f"{plural(len(names), 'file')} {differ} on the first machine, such as {names[0]}"
            )
    num = len(first) - 1  # without the tokenizer
    summary = plural(num, "file") if num > 0 else "no files to compare"
    return Checked(name="data", summary=summary, faults=faults)


def list_data(config: Config) -> dict[str, str]:
    """Return the hash of each data file of the job, and of the tokenizer."""
    fingerprints = {"the tokenizer": build_tokenizer(config.model.tokenizer_path).fingerprint}
    sources = {"training": config.training}
    if config.validation.enable and config.validation.holdout_fraction is None:
        sources["validation"] = validation_source(config.training, config.validation)
    for section, source in sources.items():
        for pattern in source.dataset_path:
            key, cache = f"{section}.dataset_path", config.training.dataset_cache
            files = find_files(pattern, key=key, cache=cache)
            fingerprints |= {str(file): _hash(file) for file in files}
    return fingerprints


def _hash(file: Path) -> str:
    """Return a hash of a file's size and ends; for the index of a token store, also its tokens'."""
    files = [file, file.with_suffix(".bin")] if file.suffix == ".idx" else [file]
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        with path.open("rb") as opened:
            digest.update(f"{size}".encode() + opened.read(HEAD))
            opened.seek(max(0, size - HEAD))
            digest.update(opened.read(HEAD))
    return digest.hexdigest()
