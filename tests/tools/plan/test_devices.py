"""The figures of devices: those that cannot be are refused, with the setting to correct."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.tools.plan.jobs import planned
from torchtitan.base.errors import ConfigError
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.devices import DEVICES, find_device

SHARE = {"worst": 0.5, "best": 0.9}
CONSTANTS: dict[str, Any] = {
    "product": "NVIDIA H100 80GB HBM3",
    "memory": 85_000_000_000,
    **dict.fromkeys(("products", "attention", "passes", "copies", "launch", "on_host"), SHARE),
}


@pytest.mark.parametrize("given", ["0", "-1", "nan", "inf"])
def test_memory_that_no_device_has_is_refused(
    given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path)
    job = f"--job.config_file={tmp_path / 'job.toml'}"
    assert main(["memory", "--world_size=1", f"--memory_gib={given}", job]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"--memory_gib must be a finite number above 0, got {given}; write ")
    assert said.count("\n") == 1


def refusal(tmp_path: Path, constants: str) -> str:
    file = tmp_path / "constants.json"
    file.write_text(constants)
    with pytest.raises(ConfigError) as refused:
        find_device(str(file), memory_gib=None)
    said = str(refused.value)
    for line in said.splitlines():
        assert line.startswith(f"--device {file}: ")
        assert line.endswith(
            "; correct the file, or measure again by scripts/benchmark.py gpu --calibrate FILE"
        )
    return said


@pytest.mark.parametrize(
    ("spoilt", "rules"),
    [
        ({"memory": 0}, ["memory: must be greater than 0, got 0"]),
        ({"memory": -1}, ["memory: must be greater than 0, got -1"]),
        ({"memory": "80"}, ['memory: must be an integer, got "80"']),
        ({"memory": True}, ["memory: must be an integer, got true"]),
        (
            {"copies": {"worst": "fast", "best": 0.9}},
            ['copies.worst: must be a number, got "fast"'],
        ),
        (
            {"copies": {"worst": 0.5, "best": float("nan")}},
            ["copies.best: must be a finite number, got nan"],
        ),
        (
            {"copies": {"worst": float("inf"), "best": 0.9}},
            ["copies.worst: must be a finite number, got inf"],
        ),
        (
            {"passes": {"worst": 0, "best": -0.9}, "memory": 0},
            [
                "memory: must be greater than 0, got 0",
                "passes.worst: must be greater than 0, got 0",
                "passes.best: must be greater than 0, got -0.9",
            ],
        ),
        ({"launch": {"worst": 1e-5}}, ["launch.best: must be a number, got none"]),
        (
            {"launch": None},
            [f"launch.{one}: must be a number, got none" for one in ("worst", "best")],
        ),
    ],
)
def test_constants_that_no_device_has_are_refused(
    spoilt: dict[str, Any], rules: list[str], tmp_path: Path
) -> None:
    """All of them together."""
    said = refusal(tmp_path, json.dumps(CONSTANTS | spoilt))
    assert re.findall(r"\.json: (.*); correct", said) == rules


def test_a_file_that_holds_no_constants_is_refused(tmp_path: Path) -> None:
    assert "is not JSON" in refusal(tmp_path, "{")
    assert "memory: must be an integer" in refusal(tmp_path, "[1]")
    with pytest.raises(ConfigError, match=r"--device .*none\.json must be a file to read: "):
        find_device(str(tmp_path / "none.json"), memory_gib=None)


def test_constants_that_can_be_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(json.dumps(CONSTANTS))
    device = find_device(str(file), memory_gib=None)
    assert find_device("NVIDIA H100 80GB HBM3", memory_gib=None) is DEVICES["H100"]
    assert (device.name, device.memory) == ("H100", 85_000_000_000)
    assert (device.copies.worst, device.copies.best) == (0.5, 0.9)
    assert (device.passes.worst, device.passes.best) == (0.5, 0.9)
