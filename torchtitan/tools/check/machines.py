"""Machines that should be alike: versions, code, settings, devices and memory."""

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
"""Of what machines usually have available, what one may have less."""

REMEDIES: Mapping[str, str] = {
    "torchtitan's code": "install or check out the same commit on all machines",
    "settings": "give all machines the same file and the same options",
    "device": "take machines of one kind, or leave this one out",
    "memory of the device": "take machines of one kind; is another program on this device?",
}


def describe_machine(config: Config, *, device: torch.device) -> dict[str, str]:
    """Return what must be the same everywhere, by name."""
    said = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchtitan": torchtitan.__version__,
        "torchtitan's code": _hash_code(),
        "settings": hashlib.sha256(to_toml(config).encode()).hexdigest()[:12],
        "device": device_name(device).partition(", threads")[0],
    }
    if device.type == "cuda":
        said["CUDA"] = str(torch.version.cuda or torch.version.hip)
        said["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        said["memory of the device"] = f"{torch.cuda.mem_get_info(device)[1] / GIB:.0f} GiB"
    return said


def check_alike(ranks: Ranks, config: Config) -> Checked:
    """Compare versions, code, settings and devices of all ranks."""
    answers = ranks.gather(describe_machine(config, device=ranks.device))
    findings, said = [], {}
    for name in answers[0] if answers else ():
        by_rank = {str(rank): answer.get(name, "none") for rank, answer in enumerate(answers)}
        said[name], others = odd_ones(by_rank)
        for other in dict.fromkeys(others.values()):
            odd = [int(rank) for rank, value in others.items() if value == other]
            findings.append(
                Finding(
                    what=f"{name} must be the same on all ranks: {said[name]} on most, got {other} "
                    f"on {ranks.named(odd)}",
                    remedy=REMEDIES.get(name, f"install the same {name} there"),
                )
            )
    summary = ", ".join(f"{name} {said[name]}" for name in ("torch", "device") if name in said)
    return Checked(name="alike", summary=summary, figures=said, findings=findings)


def _hash_code() -> str:
    """Return a hash of the sources of the package, wherever they lie."""
    root, found = Path(torchtitan.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:12]


def check_memory(ranks: Ranks) -> Checked:
    """Compare the memory that machines have available."""
    available = ranks.gather_first(available_gib())
    known = {machine: gib for machine, gib in available.items() if gib is not None}
    most = usual([*known.values()]) if known else 0.0
    findings = [
        Finding(
            what=f"machines should have as much memory available as each other, {machine} has "
            f"{gib:.1f} GiB where {most:.1f} GiB are usual",
            remedy="end what else runs there (`ps aux --sort -rss`), or leave the machine out",
        )
        for machine, gib in known.items()
        if gib < LEAST_MEMORY * most
    ]
    summary = f"{min(known.values()):.1f} GiB available at least" if known else "not known here"
    return Checked(
        name="memory", summary=summary, figures={"available_gib": known}, findings=findings
    )


def available_gib() -> float | None:
    """Return what programs can still take on this machine, as Linux estimates it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:  # another system
        return None
    [said] = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(said[1]) * 1024 / GIB
