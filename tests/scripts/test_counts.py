"""What `benchmark.py counts` counts, on a small Llama, beside formulas and what is planted."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from scripts import benchmark
from scripts.benchmarks.counts import LOW, Counts, count, least, rehearse_ours
from scripts.benchmarks.ranks import run_ranks
from scripts.benchmarks.rehearsed import rehearse_theirs
from scripts.benchmarks.turns import OURS, THEIRS
from scripts.benchmarks.waits import SETTINGS, Waits, count_waits
from torchtitan import trainer
from torchtitan.base.device import HostCopy
from torchtitan.mesh.ranks import RankInfo
from torchtitan.models.families import find_model
from torchtitan.models.settings import ModelConfig
from torchtitan.optim.clip import clip_gradients

FLAVOR = "tiny8"
SPEC, SIZES = find_model(ModelConfig(name="llama3", flavor=FLAVOR))
SHAPE = {"world_size": 4, "batch": 2, "seq_len": 64}
TOKENS = SHAPE["batch"] * SHAPE["seq_len"]
needs_theirs = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


def formula(mode: str) -> Counts:
    return least(SIZES, world=SHAPE["world_size"], tokens=TOKENS, mode=mode)


def block() -> int:
    """Return the parameters of a block."""
    model = SPEC.build_meta(SIZES)
    return sum(p.numel() for p in model.layers["1"].parameters())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_ours_equals_the_formula(mode: str) -> None:
    """But for silu(w1 x), which SwiGLU's product keeps beside what it is computed from."""
    ours, formal = count(rehearse_ours(FLAVOR, mode=mode, **SHAPE), tokens=TOKENS), formula(mode)
    again = LOW * SIZES.hidden_dim if mode == "none" else 0
    assert (ours.gathered, ours.reduced) == (formal.gathered, formal.reduced)
    assert formal.kept is not None
    assert ours.kept == formal.kept + again
    assert ours.products == formal.products
    assert ours.peak is not None
    assert formal.peak is not None
    assert ours.peak > formal.peak


@needs_theirs
@pytest.mark.parametrize("mode", ["none", "full"])
def test_theirs_equals_the_formula(mode: str) -> None:
    """But for the last block, which is gathered again, silu(w1 x) as ours, and norms: each keeps
    its input in float32, and what it multiplies by its weight."""
    record = rehearse_theirs(SIZES, spec=SPEC, recomputes=mode == "full", **SHAPE)
    theirs, formal = count(record, tokens=TOKENS), formula(mode)
    assert theirs.gathered == formal.gathered + LOW * block()
    assert theirs.reduced == formal.reduced
    assert theirs.products == formal.products
    assert formal.kept is not None
    more = LOW * SIZES.hidden_dim + 2 * (2 * LOW) * SIZES.dim if mode == "none" else 0
    assert theirs.kept == formal.kept + more


def test_the_formula_knows_the_layers() -> None:
    """One more layer is gathered twice, reduced once, and multiplies 23 times."""
    more = least(
        replace(SIZES, num_layers=SIZES.num_layers + 1),
        world=SHAPE["world_size"],
        tokens=TOKENS,
        mode="none",
    )
    assert more.gathered - formula("none").gathered == 2 * LOW * block()
    assert more.reduced - formula("none").reduced == 4 * block()
    assert more.products - formula("none").products == 23


def test_the_host_waits_where_it_asks() -> None:
    values, waits = torch.arange(4.0), Waits()
    copy = HostCopy(values)
    with waits.counting():
        values.sum().item()
        assert values.max() > 2
        values.tolist()
        values[values > 1].sum()
        values.cpu()
        assert waits.num_waits == 5
        values.nonzero()
        values + values.cumsum(0)[1:2]
        torch.count_nonzero(values)
        assert waits.num_waits == 6
        assert copy.read() == [0.0, 1.0, 2.0, 3.0]
        with waits.paused():
            values.sum().item()
    values.sum().item()
    assert (waits.num_waits, waits.num_read_later) == (6, 1)


def planted(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Count, with a number asked for where gradients are clipped."""

    def clip(parameters: Any, *, norm: Tensor, max_norm: float) -> None:
        norm.item()
        clip_gradients(parameters, norm=norm, max_norm=max_norm)

    with patch.object(trainer, "clip_gradients", clip):
        return count_waits(launch, folder, settings)


def test_a_step_of_ours_never_waits() -> None:
    settings = SETTINGS | {"loop": OURS}
    found = run_ranks(count_waits, settings, ranks=1)
    assert found["step"] == {"waits": 0, "read later": 2}
    assert found["reported"]["waits"] == 1
    found = run_ranks(planted, settings, ranks=1)
    assert found["step"] == {"waits": 1, "read later": 2}


def test_what_is_recomputed_lives_beside_the_inputs_once() -> None:
    """Of one layer the two modes hold the same: its input is not counted twice."""
    one = replace(SIZES, num_layers=1)
    none, full = (least(one, world=4, tokens=1 << 20, mode=mode) for mode in ("none", "full"))
    assert none.peak == full.peak


@needs_theirs
@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "counts.json"
    sizes = ["--flavor=tiny8", "--worlds", "4", "--batch=2", "--seq_len=64"]
    assert benchmark.main(["counts", *sizes, "--recompute", "none", "op", f"--out={out}"]) == 0
    figures = json.loads(out.read_text())
    row = figures["counts"]["none"]["4"]
    assert list(row) == [OURS, THEIRS, "least"]
    assert list(figures["counts"]["op"]["4"]) == [OURS]
    kept = f"{row[OURS]['kept']:,.0f}"
    shown = capsys.readouterr().out
    assert any(kept in line and "kept per layer" in line for line in shown.splitlines())
