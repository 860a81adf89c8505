"""Compare the versions, code, settings, devices and memory of machines."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

import torchtitan
from torchtitan.base.device import GIB, device_name
from torchtitan.config.sources import to_toml
from torchtitan.job import Config
from torchtitan.tools.check.ranks import Checked, Finding, Ranks, odd_ones, usual

LEAST_MEMORY = 0.5
"""Part of the usual available memory that each machine must have."""

REMEDIES: Mapping[str, str] = {
    "torchtitan's code": "install or check out the same commit on all machines",
    "settings": "give all machines the same file and the same options",
    "device": "use machines of one kind, or leave this one out",
    "memory of the device": "use machines of one kind, without other programs on the device",
}


def describe_machine(config: Config, *, device: torch.device) -> dict[str, str]:
    """Return the properties that must be equal on all ranks, by name."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchtitan": torchtitan.__version__,
        "torchtitan's code": _hash_code(),
        "settings": hashlib.sha256(to_toml(config).encode()).hexdigest()[:12],
        "device": device_name(device).partition(", threads")[0],
    }
    if device.type == "cuda":
        found["CUDA"] = str(torch.version.cuda or torch.version.hip)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["memory of the device"] = f"{torch.cuda.mem_get_info(device)[1] / GIB:.0f} GiB"
    return found


def check_alike(ranks: Ranks, config: Config) -> Checked:
    """Compare versions, code, settings and devices of all ranks."""
    answers = ranks.gather(describe_machine(config, device=ranks.device))
    findings, most = [], {}
    for name in answers[0] if answers else ():
        by_rank = {str(rank): answer.get(name, "none") for rank, answer in enumerate(answers)}
        most[name], others = odd_ones(by_rank)
        for other in dict.fromkeys(others.values()):
            odd = [int(rank) for rank, value in others.items() if value == other]
            findings.append(
                Finding(
                    f"{name} must be the same on all ranks: {most[name]} on most, got {other} "
                    f"on {ranks.named(odd)}",
                    REMEDIES.get(name, f"install the same {name} there"),
                )
            )
    summary = ", ".join(f"{name} {most[name]}" for name in ("torch", "device") if name in most)
    return Checked(name="alike", summary=summary, figures=most, findings=findings)


def _hash_code() -> str:
    """Return a hash of the package's source files."""
    root, found = Path(torchtitan.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def check_memory(ranks: Ranks) -> Checked:
    """Compare the available memory of machines."""
    available = ranks.gather_first(available_gib())
    known = {machine: gib for machine, gib in available.items() if gib is not None}
    most = usual([*known.values()]) if known else 0.0
    findings = [
        Finding(
            f"machines should have equal available memory, {machine} has {gib:.1f} GiB where "
            f"{most:.1f} GiB are usual",
            "end other programs there (`ps aux --sort -rss`), or leave the machine out",
        )
        for machine, gib in known.items()
        if gib < LEAST_MEMORY * most
    ]
    summary = f"{min(known.values()):.1f} GiB available at least" if known else "unknown"
    return Checked(
        name="memory", summary=summary, figures={"available_gib": known}, findings=findings
    )


def available_gib() -> float | None:
    """Return the memory that programs can allocate on this machine, estimated by Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # another system
        return None
    [words] = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(words[1]) * 1024 / GIB
