"""The facts that each rank finds, and their comparison on rank 0.

The first rank of each machine answers for its disks and data. An error is an answer too, so that
no rank waits for a failed one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.base.device import GIB, device_name, device_type, local_device
from torchtitan.base.errors import UserError
from torchtitan.base.log import plural
from torchtitan.base.urls import is_url
from torchtitan.checkpoint.checksums import verify
from torchtitan.checkpoint.storage import find_steps
from torchtitan.config.settings import to_toml
from torchtitan.data.files import find_files
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import Config
from torchtitan.layout import find_layout
from torchtitan.mesh.ranks import RankInfo, init_process_group, on_first_rank, read_rank_info
from torchtitan.parallel.layout import check_device
from torchtitan.resume_rules import resolve_model
from torchtitan.validate import validation_source

WRITTEN = 4 * 2**20
"""Bytes that each machine writes, more than an exhausted quota has."""
HEAD = 2**16
"""Bytes at each end of a data file that are compared, with its size."""
SECONDS_TO_SEE = 5.0
"""Longest time until a shared folder shows a new file; NFS caches for a few seconds."""
BYTES_PER_PARAMETER = 12
"""In a checkpoint: the weight and two moments in float32."""


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The checkpoint folder of a machine."""

    free_gib: float
    is_shared: bool
    """Whether the machine sees the file of rank 0."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The facts of a rank. Text in the place of facts is an error; None: not the first rank."""

    machine: str
    versions: dict[str, str]
    """Must be equal on all ranks."""
    disk: Disk | str | None = None
    data: dict[str, str] | str | None = None
    """Hash of each file."""


def check_job(config: Config, *, checksums: bool) -> int:
    """Check, print the table on rank 0, and return the exit code, the same on all ranks; raise
    UserError if the settings are invalid."""
    launch = read_rank_info(os.environ)
    config = resolve_model(config)
    layout = find_layout(config, world_size=launch.world_size)
    check_device(config.compile, float8=layout.float8, device_type=device_type())
    folder = Path(config.job.dump_folder)
    init_process_group(launch, device_type=device_type(), settings=config.comm, dump_folder=folder)
    needed_gib = 0.0
    if config.checkpoint.enable:
        folder /= config.checkpoint.local_folder
        needed_gib = BYTES_PER_PARAMETER * layout.counts.num_parameters / GIB
    answer = find_facts(config, launch, folder=folder)
    answers: list[Answer] | None = [answer] * launch.world_size if launch.rank == 0 else None
    dist.gather_object(answer, answers)
    damage = {"checksums": find_damage(folder)} if checksums else {}
    code = 0
    if answers is not None:
        # each machine uploads to a store from its own disk
        is_shared = not is_url(config.checkpoint.folder)
        faults = find_faults(answers, needed_gib=needed_gib, is_shared=is_shared) | damage
        machines = plural(len({answer.machine for answer in answers}), "machine")
        lines = [f"{config.model.name} {config.model.flavor}, {layout.dims}: on {machines}"]
        lines += [f"  {name:<11}  {'FAULT' if faults[name] else 'ok'}" for name in faults]
        lines += [f"{name}: {fault}" for name in faults for fault in faults[name]]
        if needed_gib:
            lines.append(f"a checkpoint takes at most about {needed_gib:.3g} GiB in {folder}")
        sys.stdout.write("\n".join([*lines, ""]))
        code = UserError.exit_code if any(faults.values()) else 0
    return on_first_rank(lambda: code, group=dist.group.WORLD)


def find_facts(config: Config, launch: RankInfo, *, folder: Path) -> Answer:
    """Return the facts of this rank. `folder` has the checkpoints. Collective."""
    names = [f".check-{os.getpid()}"]
    dist.broadcast_object_list(names)
    marker = folder / names[0]
    if launch.rank == 0:
        with suppress(OSError):  # find_disk reports it
            folder.mkdir(parents=True, exist_ok=True)
            marker.touch()
    dist.barrier()
    is_first = launch.local_rank == 0
    answer = Answer(
        machine=f"{socket.gethostname()} (node {os.environ.get('GROUP_RANK', '0')})",
        versions=describe_versions(config, device=local_device(launch.local_rank)),
        disk=find_disk(marker) if is_first else None,
        data=find_data(config) if is_first else None,
    )
    dist.barrier()
    with suppress(OSError):
        marker.unlink(missing_ok=True)
    return answer


def describe_versions(config: Config, *, device: torch.device) -> dict[str, str]:
    """Return the properties that must be equal on all ranks, by name."""
    root, code = Path(torchtitan.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        code.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchtitan": torchtitan.__version__,
        "torchtitan's code": code.hexdigest()[:12],
        "settings": hashlib.sha256(to_toml(config).encode()).hexdigest()[:12],
        "device": device_name(device).partition(", threads")[0],
    }
    if device.type == "cuda":
        facts["CUDA"] = str(torch.version.cuda or torch.version.hip)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["memory of the device"] = f"{torch.cuda.mem_get_info(device)[1] / GIB:.0f} GiB"
    return facts


def find_disk(marker: Path) -> Disk | str:
    """Write a temporary file beside `marker`; return the free space, and whether that is there."""
    folder = marker.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
            file.write(os.urandom(WRITTEN))  # cannot be compressed
            file.flush()
            os.fsync(file.fileno())
        deadline = time.monotonic() + SECONDS_TO_SEE
        while marker.name not in (names := os.listdir(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        free_gib = shutil.disk_usage(folder).free / GIB
        return Disk(free_gib=free_gib, is_shared=marker.name in names)
    except OSError as error:
        return f"cannot write to {folder}: {error}"


def find_data(config: Config) -> dict[str, str] | str:
    """Return the hash of each data file of the job, and of the tokenizer."""
    try:
        hashes = {"the tokenizer": build_tokenizer(config.model.tokenizer_path).fingerprint}
        sources = {"training": config.training}
        if config.validation.enable and config.validation.holdout_fraction is None:
            sources["validation"] = validation_source(config.training, config.validation)
        for section, source in sources.items():
            for pattern in source.dataset_path:
                key, cache = f"{section}.dataset_path", config.training.dataset_cache
                files = find_files(pattern, key=key, cache=cache)
                hashes |= {str(file): _hash(file) for file in files}
        return hashes
    except (OSError, UserError) as error:
        return f"cannot read the data: {error}"


def _hash(file: Path) -> str:
    """Return a hash of a file's size and ends; for the index of a token store, also its tokens'."""
    digest = hashlib.sha256()
    for path in (file, file.with_suffix(".bin")) if file.suffix == ".idx" else (file,):
        size = path.stat().st_size
        with path.open("rb") as opened:
            digest.update(f"{size}".encode() + opened.read(HEAD))
            opened.seek(max(0, size - HEAD))
            digest.update(opened.read(HEAD))
    return digest.hexdigest()


def find_faults(
    answers: Sequence[Answer], *, needed_gib: float, is_shared: bool
) -> dict[str, list[str]]:
    """Return the faults of each check.

    A checkpoint takes `needed_gib`. `is_shared`: all machines must see the same checkpoint folder.
    """
    return {
        "versions": [*_other_versions(answers)],
        "checkpoints": [*_bad_disks(answers, needed_gib=needed_gib, is_shared=is_shared)],
        "data": [*_other_data(answers)],
    }


def _other_versions(answers: Sequence[Answer]) -> Iterator[str]:
    for name in {name: None for answer in answers for name in answer.versions}:
        values = [answer.versions.get(name, "none") for answer in answers]
        usual = Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != usual:
                machine = answers[rank].machine
                yield f"{name} is {usual} on most ranks, got {value} on rank {rank}, {machine}"


def _bad_disks(answers: Sequence[Answer], *, needed_gib: float, is_shared: bool) -> Iterator[str]:
    for answer in answers:
        if isinstance(answer.disk, str):
            yield f"{answer.machine} {answer.disk}"
        elif answer.disk is not None:
            if (free := answer.disk.free_gib) < needed_gib:
                yield (
                    f"a checkpoint takes at most about {needed_gib:.1f} GiB, and {free:.1f} GiB "
                    f"are free on {answer.machine}"
                )
            if is_shared and not answer.disk.is_shared:
                yield (
                    f"all machines must share the folder, and {answer.machine} does not see the "
                    f"file of rank 0"
                )


def _other_data(answers: Sequence[Answer]) -> Iterator[str]:
    first = dict[str, str]()
    for answer in answers:
        if isinstance(answer.data, str):
            yield f"{answer.machine} {answer.data}"
        elif answer.data is not None:
            first = first or answer.data
            names = {**first, **answer.data}
            if different := sorted(k for k in names if first.get(k) != answer.data.get(k)):
                yield (
                    f"{plural(len(different), 'file')} on {answer.machine} differ from the first "
                    f"machine's, such as {different[0]}"
                )


def find_damage(folder: Path) -> list[str]:
    """Verify the checksums of all checkpoints in a folder. Collective."""
    steps = on_first_rank(lambda: find_steps(folder), group=dist.group.WORLD)
    checkpoints = [folder / f"step-{step}" for step in steps]
    return [f"{c}: {text}" for c in checkpoints for text in verify(c, group=dist.group.WORLD)]
