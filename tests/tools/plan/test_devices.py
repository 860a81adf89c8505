"""The figures of devices: impossible ones are refused, with the setting to correct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchtitan.base.errors import ConfigError
from torchtitan.tools.plan.devices import DEVICES, find_device

SHARE = {"worst": 0.5, "best": 0.9}
CONSTANTS: dict[str, Any] = {
    "product": "NVIDIA H100 80GB HBM3",
    "memory": 85_000_000_000,
    **dict.fromkeys(("products", "attention", "passes", "launch"), SHARE),
}
SPOILT = (
    {"product": "NVIDIA Unheard 9"},
    {"memory": -1},
    {"passes": {"worst": "fast", "best": 0.9}},
    {"passes": {"worst": 0.5, "best": float("nan")}},
    {"launch": {"worst": 1e-5}},
    {"launch": None},
)


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_sizes_are_refused(size: float) -> None:
    with pytest.raises(ConfigError, match=f"--memory_gib.*got {size:g}"):
        find_device("H100", memory_gib=size)


@pytest.mark.parametrize(
    "content", ["{", "[1]", *(json.dumps(CONSTANTS | spoilt) for spoilt in SPOILT)]
)
def test_impossible_constants_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="--device"):
        find_device(str(file), memory_gib=None)


def test_names_and_constants(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(json.dumps(CONSTANTS))
    device = find_device(str(file), memory_gib=None)
    assert (device.name, device.memory) == ("H100", 85_000_000_000)
    assert (device.passes.worst, device.passes.best) == (0.5, 0.9)
    for name in ("H100", "NVIDIA H100 80GB HBM3"):
        assert find_device(name, memory_gib=None) is DEVICES["H100"]
    assert find_device("H100-500W", memory_gib=None) is DEVICES["H100-500W"]
    assert find_device("H100", memory_gib=94).memory == 94 * 2**30
