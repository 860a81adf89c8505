"""Compare the versions, code, settings, devices and memory of machines."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from pathlib import Path

import torch

import torchtitan
from torchtitan.base.device import GIB, device_name
from torchtitan.config.settings import to_toml
from torchtitan.job import Config
from torchtitan.tools.check.ranks import Checked, Ranks, usual

LEAST_MEMORY = 0.5
"""Part of the usual available memory that each machine must have."""


def describe_machine(config: Config, *, device: torch.device) -> dict[str, str]:
    """Return the properties that must be equal on all ranks, by name."""
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchtitan": torchtitan.__version__,
        "torchtitan's code": _hash_code(),
        "settings": hashlib.sha256(to_toml(config).encode()).hexdigest()[:12],
        "device": device_name(device).partition(", threads")[0],
    }
    if device.type == "cuda":
        facts["CUDA"] = str(torch.version.cuda or torch.version.hip)
        facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["memory of the device"] = f"{torch.cuda.mem_get_info(device)[1] / GIB:.0f} GiB"
    return facts


def check_alike(ranks: Ranks, config: Config) -> Checked:
    """Compare versions, code, settings and devices of all ranks."""
    answers = ranks.gather(describe_machine(config, device=ranks.device))
    if not answers:
        return Checked(name="alike")
    faults = []
    for name in answers[0]:
        values = [answer.get(name, "none") for answer in answers]
        most = Counter(values).most_common(1)[0][0]
        for minority in dict.fromkeys(value for value in values if value != most):
            odd = [rank for rank, value in enumerate(values) if value == minority]
            faults.append(
                f"{name} must be the same on all ranks: {most} on most, got {minority} on "
                f"{ranks.named(odd)}"
            )
    summary = f"torch {answers[0]['torch']}, device {answers[0]['device']}"
    return Checked(name="alike", summary=summary, faults=faults)


def _hash_code() -> str:
    """Return a hash of the package's source files."""
    root, digest = Path(torchtitan.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def check_memory(ranks: Ranks) -> Checked:
    """Compare the available memory of machines."""
    available = ranks.gather_first(available_gib())
    measured = {machine: gib for machine, gib in available.items() if gib is not None}
    most = usual([*measured.values()]) if measured else 0.0
    faults = [
        f"machines should have equal available memory, {machine} has {gib:.1f} GiB where "
        f"{most:.1f} GiB are usual"
        for machine, gib in measured.items()
        if gib < LEAST_MEMORY * most
    ]
    summary = f"{min(measured.values()):.1f} GiB available at least" if measured else "unknown"
    return Checked(name="memory", summary=summary, faults=faults)


def available_gib() -> float | None:
    """Return the memory that programs can allocate on this machine, estimated by Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # another system
        return None
    [words] = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(words[1]) * 1024 / GIB
