"""The figures of devices: those that cannot be are refused, with the setting to correct."""

from __future__ import annotations

import json
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
    error = capsys.readouterr().err
    assert "--memory_gib" in error
    assert f"got {given}" in error


def refusal(tmp_path: Path, constants: str) -> list[str]:
    """Return the lines of the error, without the name of the file."""
    file = tmp_path / "constants.json"
    file.write_text(constants)
    with pytest.raises(ConfigError) as refused:
        find_device(str(file), memory_gib=None)
    return [line.removeprefix(f"--device {file}") for line in str(refused.value).splitlines()]


@pytest.mark.parametrize(
    ("spoilt", "values"),
    [
        ({"memory": 0}, {"memory": "0"}),
        ({"memory": -1}, {"memory": "-1"}),
        ({"memory": "80"}, {"memory": '"80"'}),
        ({"memory": True}, {"memory": "true"}),
        ({"copies": {"worst": "fast", "best": 0.9}}, {"copies.worst": '"fast"'}),
        ({"copies": {"worst": 0.5, "best": float("nan")}}, {"copies.best": "nan"}),
        ({"copies": {"worst": float("inf"), "best": 0.9}}, {"copies.worst": "inf"}),
        (
            {"passes": {"worst": 0, "best": -0.9}, "memory": 0},
            {"memory": "0", "passes.worst": "0", "passes.best": "-0.9"},
        ),
        ({"launch": {"worst": 1e-5}}, {"launch.best": "none"}),
        ({"launch": None}, {"launch.worst": "none", "launch.best": "none"}),
    ],
)
def test_constants_that_no_device_has_are_refused(
    spoilt: dict[str, Any], values: dict[str, str], tmp_path: Path
) -> None:
    """All of them together, each with its key and value."""
    lines = refusal(tmp_path, json.dumps(CONSTANTS | spoilt))
    for line, (key, value) in zip(lines, values.items(), strict=True):
        assert line.startswith(f": {key}: ")
        assert f"got {value};" in line


def test_a_file_that_holds_no_constants_is_refused(tmp_path: Path) -> None:
    assert "JSON" in refusal(tmp_path, "{")[0]
    assert any("memory" in line for line in refusal(tmp_path, "[1]"))
    with pytest.raises(ConfigError, match=r"none\.json"):
        find_device(str(tmp_path / "none.json"), memory_gib=None)


def test_constants_that_can_be_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(json.dumps(CONSTANTS))
    device = find_device(str(file), memory_gib=None)
    assert find_device("NVIDIA H100 80GB HBM3", memory_gib=None) is DEVICES["H100"]
    assert (device.name, device.memory) == ("H100", 85_000_000_000)
    assert (device.copies.worst, device.copies.best) == (0.5, 0.9)
    assert (device.passes.worst, device.passes.best) == (0.5, 0.9)
