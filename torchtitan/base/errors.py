"""Typed errors for mistakes that a user can fix. Commands print them without a traceback.

A `UserError` is raised before any long work if possible. Its message states the rule, the value
and, where it is not obvious, what to do. A broken invariant of the library is an `assert` instead.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

_CONTROL = re.compile(r"[^\n\t -~\u00a0-\ud7ff\ue000-\U0010ffff]")
"""Control characters, and surrogates, which JSON may contain but text files may not."""
E = TypeVar("E", bound="UserError")


@dataclass(frozen=True)
class Violation:
    """A violated rule about settings. A section names its own keys; `within` adds its path."""

    keys: tuple[str, ...]
    """Dotted paths of the settings in the rule, the one to blame first."""
    rule: str
    """Rule, value and remedy."""
    is_notice: bool = False
    """The job may start, e.g. because the setting only has no effect."""

    def within(self, section: str) -> Violation:
        """Return the violation with the section's path before each key."""
        return replace(self, keys=tuple(f"{section}.{key}" for key in self.keys))

    def __str__(self) -> str:
        section, _, key = self.keys[0].rpartition(".")
        return f"[{section}] {key}: {self.rule}" if section else f"{key}: {self.rule}"


def printable(text: str) -> str:
    """Escape control characters, which in stored text may come from a stranger."""
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class UserError(Exception):
    """Mistake outside the library. Exit code 2."""

    exit_code = 2

    def __str__(self) -> str:
        return printable(super().__str__())

    @classmethod
    def at(cls: type[E], keys: str | tuple[str, ...], rule: str) -> E:
        """Return the error of a violated rule about settings; see `Violation`."""
        return cls(Violation((keys,) if isinstance(keys, str) else keys, rule))


class ConfigError(UserError):
    """One or more mistakes in the job's settings, reported together."""

    def __init__(self, mistakes: str | Violation | Sequence[str | Violation]) -> None:
        if isinstance(mistakes, str | Violation):
            mistakes = [mistakes]
        self.mistakes = list(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))


class Mistakes:
    """Collects ConfigErrors of independent checks: `with mistakes:` around each, then `report`."""

    def __init__(self) -> None:
        self._collected: list[str | Violation] = []

    def __enter__(self) -> None: ...

    def __exit__(self, error_type: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._collected += error.mistakes
        return True

    def add(self, key: str, rule: str) -> None:
        """Add a violated rule about a setting."""
        self._collected.append(Violation((key,), rule))

    def report(self) -> None:
        """Raise ConfigError if there are mistakes."""
        if self._collected:
            raise ConfigError(self._collected)


def did_you_mean(name: str, names: Collection[str]) -> str:
    """Return `; did you mean 'x'?`, or "" if no name is similar."""
    lowered = {choice.lower(): choice for choice in names}
    close = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f"; did you mean {lowered[close[0]]!r}?" if close else ""


class DataError(UserError):
    """Data or tokenizer files are missing, damaged or do not fit the job."""

    def __init__(self, problem: str | Violation) -> None:
        self.problem = problem
        super().__init__(str(problem))

    @property
    def key(self) -> str | None:
        """The setting to change, if the error names one."""
        return self.problem.keys[0] if isinstance(self.problem, Violation) else None

    def within(self, section: str) -> DataError:
        """Return the error with the section's path before its keys."""
        if isinstance(self.problem, Violation):
            return DataError(self.problem.within(section))
        return self


class CheckpointError(UserError):
    """A checkpoint cannot be written, read or used by this job."""


class NonFiniteError(UserError):
    """The loss or gradient norm is not finite; its update was not applied. Exit code 3."""

    exit_code = 3


class StalledError(UserError):
    """Data, or another rank in a save, took too long; the same command resumes. Exit code 4."""

    exit_code = 4


class StoppedError(UserError):
    """The run was stopped before its last step; the same command resumes. Exit code 4."""

    exit_code = 4
