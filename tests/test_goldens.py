"""The recorded numbers: that this code computes them, and that a difference is found and named."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from scripts import goldens
from scripts.golden.jobs import JOBS
from scripts.golden.record import Record, differences, why_no_bits

RECORDED = goldens.read_goldens()["jobs"]


FEW = ["single", "tp2_pp2", "resume_fsdp2"]
"""Jobs that the gate runs."""


@pytest.mark.promise("same-bits")
@pytest.mark.slow(gate=["few"])
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", [FEW, [n for n in JOBS if n not in FEW]], ids=["few", "others"])
def test_this_code_computes_what_was_recorded(names: list[str]) -> None:
    """Not bfloat16 from torch 2.15 on, whose FSDP no longer rounds the gradients of norms: see
    tests/parallel/test_precision.py."""
    left_out = {"bfloat16"} if TorchVersion(torch.__version__) >= (2, 15) else set()
    command = [sys.executable, goldens.__file__, "check", *(n for n in names if n not in left_out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def nudge(row: dict[str, Any], figure: str) -> None:
    row[figure] *= 1 + 1e-15


PLANTED: dict[str, tuple[Callable[[Record], object], str]] = {
    "loss": (lambda record: nudge(record["rows"][2], "loss"), "step 3, loss: "),
    "weights": (
        lambda record: (
            record.update(weights="0"),
            record["tensors"].update({"norm.weight": "0"}),
        ),
        "weights: 1 of 21 tensors differ, first norm.weight",
    ),
    "generators": (lambda record: record.update(generators="0"), "generators: "),
}


@pytest.mark.promise("same-bits")
@pytest.mark.parametrize("planted", PLANTED)
def test_a_difference_is_named(planted: str) -> None:
    change, expected = PLANTED[planted]
    found = copy.deepcopy(RECORDED["single"])
    assert list(differences(RECORDED["single"], found, exact=True)) == []
    change(found)
    [complaint] = differences(RECORDED["single"], found, exact=True)
    assert complaint.startswith(expected)


def test_on_another_machine_figures_may_differ_a_little_and_hashes_at_all() -> None:
    ours = {
        "torch": "2.13.0",
        "machine": "x86_64",
        "capability": "DEFAULT",
        "cpu": "A",
        "libc": "g",
    }
    assert why_no_bits(ours, dict(ours)) == ""
    assert "cpu A, not B" in why_no_bits(ours, ours | {"cpu": "B"})
    assert "torch 2.13.0, not 2.12.0" in why_no_bits(ours, ours | {"torch": "2.12.0"})
    found = copy.deepcopy(RECORDED["single"])
    found["weights"], found["tensors"], found["optimizer"] = "0", {}, "0"
    found["rows"][1]["loss"] *= 1 + 5e-6
    assert list(differences(RECORDED["single"], found, exact=False)) == []
    found["rows"][1]["loss"] *= 1 + 1e-5
    [complaint] = differences(RECORDED["single"], found, exact=False)
    assert complaint.startswith("step 2, loss: ")
