"""Memory snapshots: on schedule and out of memory, with the allocator's recorder replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from torchtitan.metrics.settings import ProfilingConfig
from torchtitan.metrics.trace import MemorySnapshots

SETTINGS = ProfilingConfig(enable_memory_snapshot=True, profile_freq=2)


@pytest.fixture
def observers(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., None]]:
    """Replace the recorder; return what is attached to the allocator. A file has the state."""
    attached: list[Callable[..., None]] = []
    state: dict[str, Any] = {"enabled": None}

    def record(enabled: str | None = "all", *, stacks: str = "all", max_entries: int = 0) -> None:
        state["enabled"] = enabled

    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", record)
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text(str(state)))
    name = "_cuda_attach_out_of_memory_observer"
    monkeypatch.setattr(torch._C, name, attached.append, raising=False)
    return attached


def test_on_schedule_and_out_of_memory(
    observers: list[Callable[..., None]], tmp_path: Path
) -> None:
    snapshots = MemorySnapshots(SETTINGS, folder=tmp_path, rank=3, step=7)
    for step in (8, 9):
        snapshots.step(step)
    (out_of_memory,) = observers
    out_of_memory(0, 1024, 2048, 512)
    snapshots.close()
    out_of_memory(0, 1024, 2048, 512)  # of a later run of this process
    found = {p.relative_to(tmp_path).as_posix(): p.read_text() for p in tmp_path.rglob("*.*")}
    name = "rank_3_memory_snapshot.pickle"
    recording = "{'enabled': 'all'}"
    assert found == {
        f"memory_snapshot/iteration_8/{name}": recording,
        f"memory_snapshot/iteration_10_exit/{name}": recording,
    }
    torch.cuda.memory._dump_snapshot(str(tmp_path / "closed"))
    assert (tmp_path / "closed").read_text() == "{'enabled': None}"
