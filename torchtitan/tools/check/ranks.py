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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.base.device import GIB, device_name, device_type, local_device
from torchtitan.base.errors import ConfigError, UserError
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


@dataclass(kw_only=True)
class Answer:
    """The facts of a rank, and the faults that it found by itself."""

    machine: str
    versions: dict[str, str]
    """Must be equal on all ranks."""
    data: dict[str, str] | None = None
    """Hash of each file, which must be equal on all machines. None: not the first rank of one."""
    faults: dict[str, list[str]] = field(default_factory=dict)
    """Faults of each check, on the first rank of a machine."""


def check_job(config: Config, *, checksums: bool) -> int:
    """Check, print the table on rank 0, and return the exit code, the same on all ranks; raise
    UserError if the settings are invalid."""
    launch = read_rank_info(os.environ)
    config = resolve_model(config)
    layout = find_layout(config, world_size=launch.world_size)
    if checksums and (not config.checkpoint.enable or is_url(config.checkpoint.folder)):
        raise ConfigError.at("checkpoint", "must be enabled, in a local folder, for --checksums")
    check_device(config.compile, float8=layout.float8, device_type=device_type())
    folder, needed_gib = Path(config.job.dump_folder), 0.0
    init_process_group(launch, device_type=device_type(), settings=config.comm, dump_folder=folder)
    if config.checkpoint.enable:
        folder /= config.checkpoint.local_folder
        needed_gib = BYTES_PER_PARAMETER * layout.counts.num_parameters / GIB
    answer = find_facts(config, launch, folder=folder, needed_gib=needed_gib)
    answers: list[Answer] | None = [answer] * launch.world_size if launch.rank == 0 else None
    dist.gather_object(answer, answers)
    damage, verified = {}, 0
    if checksums:
        verified, damage["checksums"] = find_damage(folder)
    code = 0
    if answers is not None:
        faults = find_faults(answers) | damage
        machines = plural(len({answer.machine for answer in answers}), "machine")
        lines = [f"{config.model.name} {config.model.flavor}, {layout.dims}: on {machines}"]
        lines += [f"  {name:<11}  {'FAULT' if faults[name] else 'ok'}" for name in faults]
        lines[-1] += f" ({plural(verified, 'checkpoint')})" * checksums
        lines += [f"{name}: {fault}" for name in faults for fault in faults[name]]
        sys.stdout.write("\n".join([*lines, ""]))
        code = UserError.exit_code if any(faults.values()) else 0
    return on_first_rank(lambda: code, group=dist.group.WORLD)


def find_facts(
    config: Config, launch: RankInfo, *, folder: Path, needed_gib: float = 0.0
) -> Answer:
    """Return the answer of this rank. `folder` has the checkpoints, each of `needed_gib` at most.
    Collective."""
    names = [f".check-{os.getpid()}"]
    dist.broadcast_object_list(names)
    marker = folder / names[0]
    if launch.rank == 0:
        with suppress(OSError):  # find_disk_faults reports it
            folder.mkdir(parents=True, exist_ok=True)
            marker.touch()
    dist.barrier()
    answer = Answer(
        machine=f"{socket.gethostname()} (node {os.environ.get('GROUP_RANK', '0')})",
        versions=describe_versions(config, device=local_device(launch.local_rank)),
    )
    if launch.local_rank == 0:
        # each machine uploads to a store from its own disk
        marker_seen = None if is_url(config.checkpoint.folder) else marker.name
        disk = find_disk_faults(folder, needed_gib=needed_gib, marker=marker_seen)
        answer.faults["checkpoints"] = [*disk]
        try:
            answer.data = hash_data(config)
        except (OSError, UserError) as error:
            answer.faults["data"] = [str(error)]
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


def find_disk_faults(folder: Path, *, needed_gib: float, marker: str | None) -> Iterator[str]:
    """Write a temporary file; yield the faults of the disk. `marker` is the name of a file that
    rank 0 has written; None: the machines do not share the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
            file.write(os.urandom(WRITTEN))  # cannot be compressed
            file.flush()
            os.fsync(file.fileno())
        deadline = time.monotonic() + SECONDS_TO_SEE
        while marker and marker not in os.listdir(folder):
            if time.monotonic() > deadline:
                yield f"{folder} must be one folder for all machines, and lacks the file of rank 0"
                break
            time.sleep(0.1)
        free_gib = shutil.disk_usage(folder).free / GIB
        if free_gib < needed_gib:
            yield (
                f"a checkpoint takes at most about {needed_gib:.1f} GiB, and {folder} has "
                f"{free_gib:.1f} GiB free"
            )
    except OSError as error:
        yield f"{folder} must be writable: {error}"


def hash_data(config: Config) -> dict[str, str]:
    """Return the hash of each data file of the job, and of the tokenizer."""
    hashes = {"the tokenizer": build_tokenizer(config.model.tokenizer_path).fingerprint}
    sources = {"training": config.training}
    if config.validation.enable and config.validation.holdout_fraction is None:
        sources["validation"] = validation_source(config.training, config.validation)
    for section, source in sources.items():
        for pattern in source.dataset_path:
            key, cache = f"{section}.dataset_path", config.training.dataset_cache
            hashes |= {str(f): _hash(f) for f in find_files(pattern, key=key, cache=cache)}
    return hashes


def _hash(file: Path) -> str:
    """Return a hash of a file's size and ends; for the index of a token store, also its tokens'."""
    digest = hashlib.sha256()
    for path in (file, file.with_suffix(".bin")) if file.suffix == ".idx" else (file,):
        size = path.stat().st_size
        with path.open("rb") as opened:
            digest.update(f"{size}".encode() + opened.read(HEAD))
            opened.seek(max(0, size - HEAD))
            digest.update(opened.read(HEAD))
    return digest.hexdigest()[:12]


def find_faults(answers: Sequence[Answer]) -> dict[str, list[str]]:
    """Return the faults of each check."""
    ranks = {f"rank {rank}, {a.machine}": a for rank, a in enumerate(answers)}
    faults = {
        "versions": [*find_differences({rank: a.versions for rank, a in ranks.items()})],
        "checkpoints": [],
        "data": [*find_differences({r: a.data for r, a in ranks.items() if a.data is not None})],
    }
    for rank, answer in ranks.items():
        for name, texts in answer.faults.items():
            faults[name] += [f"{rank}: {text}" for text in texts]
    return faults


def find_differences(facts: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield each rank whose facts are not the most common ones."""
    names = {name: None for own in facts.values() for name in own}
    values = {name: [own.get(name, "missing") for own in facts.values()] for name in names}
    usual = {name: Counter(of_ranks).most_common(1)[0][0] for name, of_ranks in values.items()}
    for rank, own in facts.items():
        changed = [name for name in names if own.get(name, "missing") != usual[name]]
        for name in changed[:1]:
            more = f", and {len(changed) - 1} more differ" if changed[1:] else ""
            value = own.get(name, "missing")
            yield f"{rank}: {name} is {value}, elsewhere {usual[name]}{more}"


def find_damage(folder: Path) -> tuple[int, list[str]]:
    """Return the number of checkpoints in a folder, and what is damaged in them. Collective."""
    steps = on_first_rank(lambda: find_steps(folder), group=dist.group.WORLD)
    checkpoints = [folder / f"step-{step}" for step in steps]
    damage = [f"{c}: {text}" for c in checkpoints for text in verify(c, group=dist.group.WORLD)]
    return len(checkpoints), damage
