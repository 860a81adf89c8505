"""The record of a run, and the differences of two records.

Floats are written as Python's `repr` of them, the shortest text that reads back as the same bits.
Tensors are read with torch's reader of checkpoints, unsharded and without a process group, because
these numbers also guard the library's reader.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

FIGURES = (
    "step",
    "loss",
    "max_loss",
    "grad_norm",
    "lr",
    "num_tokens",
    "valid_token_fraction",
    "validation_loss",
)
"""All figures of a row that do not depend on the machine's speed."""
TOLERANCE = 1e-5
DIGITS = 8
"""Digits of the hash of one tensor: enough to identify those that differ."""
Record = dict[str, Any]


def read_record(folder: Path) -> Record:
    """Return what a run left: its rows, and hashes of the newest checkpoint."""
    steps = {
        int(path.name.removeprefix("step-")): path for path in folder.glob("checkpoint/step-*")
    }
    step = steps[max(steps)]
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    train_state = _state(step, "train_state")
    tensors = {part: _hashes(step / part) for part in ("model", "optimizer", "train_state")}
    return {
        "rows": [{key: row[key] for key in FIGURES if key in row} for row in rows],
        "position": _state(step, "dataloader")["position"],
        "step": train_state["step"],
        "tokens_seen": train_state["tokens_seen"],
        "weights": _whole(tensors["model"]),
        "optimizer": _whole(tensors["optimizer"]),
        "generators": _whole(tensors["train_state"]),
        "tensors": {name: digest[:DIGITS] for name, digest in tensors["model"].items()},
    }


def _state(step: Path, part: str) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((step / part / "state.json").read_text(encoding="utf-8"))
    return state


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in a folder of DCP, in the order of their names."""
    import torch
    import torch.distributed.checkpoint as dcp

    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in sorted(stored.items())
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def _hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each tensor: of its type, shape and bytes."""
    import torch

    digests, tensors = {}, read_tensors(folder)
    if "step" in tensors:  # the count of all parameters, which each optimizer holds per parameter
        step, ending = tensors.pop("step"), ".exp_avg"
        tensors |= {f"{n.removesuffix(ending)}.step": step for n in tensors if n.endswith(ending)}
    for name, tensor in sorted(tensors.items()):
        digest = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        digests[name] = digest.hexdigest()
    return digests


def _whole(digests: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{n} {d}\n" for n, d in digests.items()).encode()).hexdigest()


def about_machine() -> dict[str, str]:
    """Return the properties of this machine that the bits may depend on."""
    import torch

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "machine": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": names[0] if names else platform.processor(),
    }


def why_no_bits(found: Mapping[str, str], recorded: Mapping[str, str]) -> str:
    """Return why two machines may compute different bits; "" if they must not."""
    keys = ("torch", "machine", "capability", "libc", "cpu")
    return ", ".join(f"{k} {found[k]}, not {recorded[k]}" for k in keys if found[k] != recorded[k])


def differences(recorded: Record, found: Record, *, exact: bool) -> Iterator[str]:
    """Yield the differences: figures step by step, then the final state.

    Unless `exact`, figures may differ by a relative TOLERANCE, and hashes are not compared.
    """
    for old, new in zip(recorded["rows"], found["rows"], strict=False):
        for key in (key for key in FIGURES if key in old or key in new):
            if not _equal(old.get(key), new.get(key), exact=exact):
                yield f"step {old['step']}, {key}: {old.get(key)!r} recorded, {new.get(key)!r} now"
    for key in ("position", "step", "tokens_seen"):
        if recorded[key] != found[key]:
            yield f"{key}: {recorded[key]} recorded, {found[key]} now"
    if len(recorded["rows"]) != len(found["rows"]):
        yield f"rows: {len(recorded['rows'])} recorded, {len(found['rows'])} now"
    if not exact:
        return
    old, new = recorded["tensors"], found["tensors"]
    apart = [name for name in sorted({*old, *new}) if old.get(name) != new.get(name)]
    if recorded["weights"] != found["weights"]:
        yield f"weights: {len(apart)} of {len(old)} tensors differ, first {', '.join(apart[:3])}"
    for key in ("optimizer", "generators"):
        if recorded[key] != found[key]:
            yield f"{key}: different state"


def _equal(old: float | None, new: float | None, *, exact: bool) -> bool:
    if exact or old is None or new is None:
        return old == new
    return math.isclose(old, new, rel_tol=TOLERANCE)
