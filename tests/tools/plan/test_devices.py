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
    error = capsys.readouterr().err
    assert "--memory_gib" in error
    assert f"got {given}" in error


@pytest.mark.parametrize(
    "content",
    [
        *("{", "[1]", json.dumps(CONSTANTS | {"product": "NVIDIA Unheard 9"})),
        *(
            json.dumps(CONSTANTS | spoilt)
            for spoilt in (
                {"memory": -1},
                {"copies": {"worst": "fast", "best": 0.9}},
                {"copies": {"worst": 0.5, "best": float("nan")}},
                {"launch": {"worst": 1e-5}},
                {"launch": None},
            )
        ),
    ],
)
def test_constants_that_no_device_has_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"--device {file}")):
        find_device(str(file), memory_gib=None)


def test_constants_that_can_be_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(json.dumps(CONSTANTS))
    device = find_device(str(file), memory_gib=None)
    assert find_device("NVIDIA H100 80GB HBM3", memory_gib=None) is DEVICES["H100"]
    assert (device.name, device.memory) == ("H100", 85_000_000_000)
    assert (device.copies.worst, device.copies.best) == (0.5, 0.9)
    assert (device.passes.worst, device.passes.best) == (0.5, 0.9)
    assert find_device("H100", memory_gib=94).memory == 94 * 2**30


def test_a_name_of_the_table_comes_before_that_of_a_driver() -> None:
    assert find_device("H100-500W", memory_gib=None) is DEVICES["H100-500W"]
    assert find_device("H100", memory_gib=None) is DEVICES["H100"]
