"""What a copy of the state takes on the host while it is saved, added up from the model's sizes.

That real runs take as much is in tests/distributed/test_plan_real.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.plan.jobs import planned, recorded
from tests.tools.plan.test_account import (
    LAYERS,
    PARAMETERS,
)
from torchtitan.tools.plan.memory import staged

SAVES = "--checkpoint.enable=true"
MODE = "--checkpoint.async_mode="
PINNED = f"{MODE}async_with_pinned_mem"
OFFLOADED = "--training.enable_cpu_offload=true"
EXACT = 3 * 4 * PARAMETERS + 4
"""AdamW has two moments of each weight, and one step count is saved for all tensors."""
POWERS = 3 * (
    LAYERS * (2 * 4096 + 2 * 2048 + 3 * 16384 + 2 * 128) + 2 * 65536 + 128
) + 4  # fmt: skip
"""The same, each tensor in a piece of 2^n bytes."""


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((SAVES, f"{MODE}async"), EXACT),
        ((SAVES, PINNED), POWERS),
        ((SAVES, PINNED, OFFLOADED), EXACT),
        ((SAVES,), 0),
        ((PINNED,), 0),
    ],
    ids=["async", "pinned", "pinned, offloaded", "files alone", "off"],
)
def test_bytes_of_the_copy(settings: tuple[str, ...], expected: int, tmp_path: Path) -> None:
    record = recorded(*(one for one in settings if one == OFFLOADED))
    assert staged(planned(tmp_path, *settings), record) == expected
