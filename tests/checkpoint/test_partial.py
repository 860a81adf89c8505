"""What is said of parameters that a pattern excludes."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from torchtitan.checkpoint.partial import log_excluded
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.checkpoint.start import Start


@pytest.mark.parametrize(("pattern", "weights"), [("old.*", None), ("head.*", "6 weights")])
def test_a_warning_is_for_weights_that_the_model_has(
    pattern: str, weights: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored = {"old.weight": torch.zeros(4), "head.weight": torch.zeros(3, 2)}
    dcp.save(stored, checkpoint_id=tmp_path / "model", no_dist=True)
    model = nn.ModuleDict({"head": nn.Linear(2, 3, bias=False)})
    start = Start(source=Checkpoint(path=tmp_path, group=None), mode="finetune", exclude=(pattern,))
    alone: Any = None
    with caplog.at_level(logging.INFO):
        log_excluded(SimpleNamespace(model=model), start, loaded=["model"], group=alone)  # type: ignore[arg-type]
    [record] = [r for r in caplog.records if pattern in r.getMessage()]
    assert (record.levelno >= logging.WARNING) == (weights is not None)
    assert weights is None or weights in record.getMessage()
