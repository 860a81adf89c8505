"""Callbacks: custom code that follows a run.

All ranks run the same loop: if one rank left it, or did more or less than the other ranks, they
would wait for it in their next collective. So each hook is called on every rank at the same steps,
and nothing that it does on a single rank can make the ranks diverge. An error is stored, exchanged
with the reduction of the next step, and ends the run on all ranks with the same message. A request
to stop is exchanged in the same way. Figures are added to this rank's row only. The state of
torch's random generators is restored after each hook. Hooks are still called after an error, so
that collectives inside them find all ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from torchtitan.base.custom import describe_error, instantiate
from torchtitan.base.errors import ConfigError

logger = logging.getLogger(__name__)
KEY = "training.callbacks"


class Callbacks(Protocol):
    """Protocol of a callback: a class with any of these methods, each called on every rank."""

    def on_start(self, run: Any) -> None:
        """Called before the first step with the torchtitan.trainer.Run."""

    def on_step(self, step: int, row: Mapping[str, object] | None) -> str | None:
        """Called after each step. `row` has its figures if it is logged.

        Return a text to stop the run on all ranks, with a checkpoint, after the next step.
        """

    def on_validation(
        self, step: int, row: Mapping[str, object]
    ) -> Mapping[str, float | None] | None:
        """Called after each validation. Returned figures are added to the row."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Called after each save; a background save has only started."""

    def on_end(self, reason: str | None) -> None:
        """Called when the run ends or stops for a `reason`, but not after an error."""


HOOKS = tuple(name for name in vars(Callbacks) if name.startswith("on_"))


class CallbackRunner:
    """Calls the hooks of all callbacks; stores errors and requests to stop."""

    def __init__(self, callbacks: Sequence[object], *, device: torch.device) -> None:
        self._callbacks, self._device = list(callbacks), device
        self._error = ""
        self.stops = ""
        """Why a callback asks to stop the run; empty if none does."""

    def has_failed(self) -> bool:
        """Return whether a callback has raised an error."""
        return bool(self._error)

    def start(self, run: object) -> None:
        """Call `on_start`. Collective. Raises ConfigError if a callback failed on any rank."""
        self._call("on_start", run)
        self.raise_failure()

    def step(self, step: int, row: Mapping[str, object] | None) -> None:
        """Call `on_step` with a copy of the row."""
        for asked in self._call("on_step", step, None if row is None else dict(row)):
            if not isinstance(asked, str):
                self._fail(f"on_step must return a text or None, got {asked!r:.80}")
            else:
                logger.warning("A callback asks to stop the run: %s", asked)
                self.stops = self.stops or asked or "no reason given"

    def validation(self, step: int, row: Mapping[str, object]) -> dict[str, Any]:
        """Call `on_validation`; return figures to add to the row."""
        figures: dict[str, Any] = {}
        for added in self._call("on_validation", step, dict(row)):
            is_new = isinstance(added, Mapping) and not added.keys() & {*row, *figures}
            if isinstance(added, Mapping) and is_new and all(map(_is_number, added.values())):
                figures |= added
            else:
                rule = "on_validation must return finite numbers with new names"
                self._fail(f"{rule}, got {added!r:.80}")
        return figures

    def checkpoint(self, step: int, path: Path) -> None:
        """Call `on_checkpoint` after a save, or when a background save has started."""
        self._call("on_checkpoint", step, path)

    def end(self, reason: str | None) -> str | None:
        """Call `on_end`; return the reason and the texts of callbacks that asked. Collective.
        Raises ConfigError if a callback failed, now or since the last exchange."""
        if reason is not None and reason.startswith("a callback"):
            reason = ": ".join([reason, *filter(None, dict.fromkeys(_gather(self.stops)))])
        self._call("on_end", reason)
        self.raise_failure()
        return reason

    def raise_failure(self) -> None:
        """Raise the first error of any rank. Collective. Raises ConfigError if a callback failed,
        on every rank alike."""
        for rank, error in enumerate(_gather(self._error)):
            if error:
                raise ConfigError.at(KEY, f"{error}\n(on rank {rank})")

    def _call(self, hook: str, *arguments: object) -> list[object]:
        """Call a hook of all callbacks; return the results that are not None."""
        results = []
        devices = [self._device] if self._device.type == "cuda" else []
        for callback in self._callbacks:
            if not hasattr(callback, hook):
                continue
            with torch.random.fork_rng(devices):
                try:
                    results.append(getattr(callback, hook)(*arguments))
                except KeyboardInterrupt:  # from a signal
                    raise
                except BaseException as error:  # noqa: BLE001 - all ranks will raise it
                    self._fail(describe_error(error))
        return [result for result in results if result is not None]

    def _fail(self, message: str) -> None:
        self._error = self._error or f"a callback failed: {message}"


def _gather(text: str) -> list[str]:
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return texts


def _is_number(value: object) -> bool:
    return value is None or (
        isinstance(value, (int, float)) and abs(value) <= sys.float_info.max  # NaN is not
    )


def build_callbacks(settings: Sequence[Mapping[str, Any]]) -> list[object]:
    """Build the callbacks of `training.callbacks`, tables of an import path and its arguments;
    raise ConfigError if a callback does not exist, takes other arguments or has an unknown hook."""
    callbacks = []
    for options in settings:
        path, kwargs = options["path"], {k: v for k, v in options.items() if k != "path"}
        callbacks.append(instantiate(path, key=KEY, kwargs=kwargs))
        check_callback(callbacks[-1], path=path)
    return callbacks


def check_callback(callback: object, *, path: str) -> None:
    """Check the names of a callback's hooks; `path` names it in messages; raise ConfigError if it
    has no hook, or an unknown one, which would never be called."""
    names = [name for name in dir(callback) if name.startswith("on_")]
    unknown = [name for name in names if name not in HOOKS]
    if unknown or not names:
        got = ", ".join(unknown) or "none"
        raise ConfigError.at(KEY, f"'{path}' must have some of {', '.join(HOOKS)}, got {got}")
