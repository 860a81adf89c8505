"""Typed errors for what a user can mend, so that `train.py` can answer with a message alone.

A `UserError` is raised before any long work where that is possible. Its text says what rule holds,
what was given and what to do; `main()` prints it without a traceback and exits with its code. An
invariant of ours that breaks is an `assert`, never one of these.
"""

from __future__ import annotations

from collections.abc import Sequence


class UserError(Exception):
    """Something outside the library has to change; exit code 2."""

    exit_code = 2


class ConfigError(UserError):
    """One or more mistakes in the job's settings, all of them reported together."""

    def __init__(self, mistakes: str | Sequence[str]) -> None:
        self.mistakes = [mistakes] if isinstance(mistakes, str) else list(mistakes)
        super().__init__("\n".join(self.mistakes))


class DataError(UserError):
    """Data or tokenizer files that are missing, damaged or do not fit the job."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read or used by this job."""


class NonFiniteError(UserError):
    """The loss or the gradient norm is not a finite number; the weights were left unchanged."""

    exit_code = 3


class StoppedError(UserError):
    """The run was asked to end before its last step; started again, it goes on."""

    exit_code = 4
