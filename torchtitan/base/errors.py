"""Typed errors for what a user can mend, so that `train.py` can answer with a message alone.

A `UserError` is raised before any long work where that is possible. Its text says what rule holds,
what was given and what to do; `main()` prints it without a traceback and exits with its code. An
invariant of ours that breaks is an `assert`, never one of these.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

_CONTROL = re.compile(r"[^\n\t -~\u00a0-\ud7ff\ue000-\U0010ffff]")
"""Control characters, and surrogates, which JSON may hold and no text file."""
E = TypeVar("E", bound="UserError")
T = TypeVar("T")


@dataclass(frozen=True)
class Violation:
    """A rule about settings that does not hold.

    A room names keys as its own section has them, `seq_len`; whoever knows where the section stands
    adds that by `within`, and whoever knows which file gave the value words the place.
    """

    keys: tuple[str, ...]
    """The settings that the rule ties, by dotted paths; the one to blame comes first."""
    rule: str
    """What must hold, what was given, and what to do."""
    is_notice: bool = False
    """The job may start: the setting has no effect, or is worth a remark."""

    def within(self, section: str) -> Violation:
        """Return it with the path of the section before each key."""
        return replace(self, keys=tuple(f"{section}.{key}" for key in self.keys))

    def __str__(self) -> str:
        section, _, key = self.keys[0].rpartition(".")
        return f"[{section}] {key}: {self.rule}" if section else f"{key}: {self.rule}"


def printable(text: str) -> str:
    """Return a text without characters that steer a terminal: stored ones may be a stranger's."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class UserError(Exception):
    """Something outside the library has to change; exit code 2."""

    exit_code = 2

    def __str__(self) -> str:
        return printable(super().__str__())

    @classmethod
    def at(cls: type[E], keys: str | tuple[str, ...], rule: str) -> E:
        """Return the error of a rule about settings, by their dotted paths, that does not hold; of
        several the one to blame comes first."""
        return cls(Violation((keys,) if isinstance(keys, str) else keys, rule))


class ConfigError(UserError):
    """One or more mistakes in the job's settings, all of them reported together."""

    def __init__(self, mistakes: str | Violation | Sequence[str | Violation]) -> None:
        if isinstance(mistakes, str | Violation):
            mistakes = [mistakes]
        self.mistakes = list(mistakes)
        super().__init__("\n".join(map(str, self.mistakes)))


class Mistakes:
    """Collects the mistakes of checks that do not depend on each other, to report them together."""

    def __init__(self) -> None:
        self._found: list[str | Violation] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Return what the check returns, or None where it raises ConfigError."""
        try:
            return check()
        except ConfigError as error:
            self._found += error.mistakes
            return None

    def add(self, key: str, rule: str) -> None:
        """Add a rule about a setting that does not hold."""
        self._found.append(Violation((key,), rule))

    def report(self) -> None:
        """Raise ConfigError with all mistakes so far, if there are any."""
        if self._found:
            raise ConfigError(self._found)


def nearest(given: str, names: Collection[str]) -> str | None:
    """Return which of the names was most likely meant: by its letters, or as an abbreviation."""
    lowered = {name.lower(): name for name in names}
    word = given.lower()
    close = difflib.get_close_matches(word, lowered, n=1)
    close += [name for name in lowered if word and name.startswith(word)]
    close += [name for name in lowered if len(word) > 1 and word in name]
    return lowered[close[0]] if close else None


def did_you_mean(given: str, names: Collection[str]) -> str:
    """Return `; did you mean 'x'?`, or nothing where no name is near."""
    near = nearest(given, names)
    return "" if near is None else f"; did you mean {near!r}?"


class DataError(UserError):
    """Data or tokenizer files that are missing, damaged or do not fit the job.

    A `Violation` names the setting to change, as its own section has it.
    """

    def __init__(self, problem: str | Violation) -> None:
        self.problem = problem
        super().__init__(str(problem))

    @property
    def key(self) -> str | None:
        """Return the setting to change, if the error names one."""
        return self.problem.keys[0] if isinstance(self.problem, Violation) else None

    def within(self, section: str) -> DataError:
        """Return it with the path of the section before its keys."""
        if isinstance(self.problem, Violation):
            return DataError(self.problem.within(section))
        return self


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read or used by this job."""


class NonFiniteError(UserError):
    """The loss or the gradient norm is not a finite number; the weights were left unchanged."""

    exit_code = 3


class StalledError(UserError):
    """Data, or another rank in a save, did not come in time; run again, the job resumes."""

    exit_code = 4


class StoppedError(UserError):
    """The run was asked to end before its last step; started again, it goes on."""

    exit_code = 4
