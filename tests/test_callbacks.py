"""Callbacks on one rank: what they are given, and what they cannot disturb."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from torchtitan.base.errors import ConfigError
from torchtitan.callbacks import HOOKS, CallbackRunner

CPU = torch.device("cpu")


class Noting:
    """Draws, and notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for hook in HOOKS:
            setattr(self, hook, lambda *given, hook=hook: self.note(hook, *given))

    def note(self, *call: Any) -> None:
        torch.rand(3)
        self.calls.append(call)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "all_gather_object", lambda into, one: into.__setitem__(0, one))


@pytest.mark.promise("nobody-forks")
@pytest.mark.usefixtures("alone")
def test_each_hook_is_called_and_its_draws_are_given_back() -> None:
    noting = Noting()
    hooks = CallbackRunner([noting], device=CPU)
    before = torch.get_rng_state()
    hooks.start("run")
    hooks.step(1, None)
    assert hooks.validation(1, {"loss": 2.0}) == {}
    hooks.checkpoint(1, Path("step-1"))
    hooks.end(None)
    assert noting.calls == [
        ("on_start", "run"),
        ("on_step", 1, None),
        ("on_validation", 1, {"loss": 2.0}),
        ("on_checkpoint", 1, Path("step-1")),
        ("on_end", None),
    ]
    assert torch.equal(before, torch.get_rng_state())
    assert not hooks.stops
    assert not hooks.has_failed()


class Leaves:
    def on_end(self, reason: str | None) -> None:
        sys.exit(3)


class Answers:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def on_step(self, step: int, row: object) -> Any:
        return self.answer

    def on_validation(self, step: int, row: object) -> Any:
        return self.answer


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("text", ["enough", ""])
def test_a_text_asks_for_the_end(text: str) -> None:
    hooks = CallbackRunner([Answers(None), Answers(text)], device=CPU)
    assert hooks.end("a signal") == "a signal"
    hooks.step(1, None)
    assert hooks.stops
    assert not hooks.has_failed()
    assert hooks.end(None) is None  # it finished
    assert (text or "no reason given") in str(hooks.end("a callback"))
    assert hooks.end("a signal") == "a signal"


@pytest.mark.usefixtures("alone")
def test_the_first_error_is_kept_and_told_with_its_lines() -> None:
    class Raises(Noting):
        def note(self, *call: Any) -> None:
            super().note(*call)
            raise ZeroDivisionError(call[0])

    leaving = CallbackRunner([Leaves()], device=CPU)
    leaving.start("run")
    with pytest.raises(ConfigError, match="SystemExit: 3"):
        leaving.end(None)
    raising = Raises()
    hooks = CallbackRunner([raising], device=CPU)
    with pytest.raises(ConfigError):
        hooks.start("run")
    hooks.step(1, None)  # called on, as on ranks that have not failed: hooks may meet in it
    assert [call[0] for call in raising.calls] == ["on_start", "on_step"]
    with pytest.raises(ConfigError) as error:
        hooks.end(None)
    said = str(error.value)
    assert "[training] callbacks" in said
    assert "raise ZeroDivisionError(call[0])" in said
    assert said.endswith("ZeroDivisionError: on_start\n(on rank 0)")
