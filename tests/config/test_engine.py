"""The engine over a tree that is not ours, with the keys of a program that is not torchtitan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

import pytest

from tests.config.jobs import Jobs, mistakes_of
from tests.naming import naming
from torchtitan.base.errors import ConfigError, Violation
from torchtitan.config.help import describe
from torchtitan.config.old_names import OldNames
from torchtitan.config.settings import (
    ENABLED,
    SET,
    UNSET,
    Loaded,
    NonNegativeInt,
    PositiveInt,
    Requires,
    Text,
    checked,
    keys,
    load,
    sections,
    to_toml,
)


@dataclass(frozen=True, kw_only=True)
class Oven:
    """Heat."""

    degrees: NonNegativeInt = 200
    """In Celsius."""
    fan: Annotated[bool, Requires("degrees", ENABLED, is_notice=True)] = False
    """Blow."""
    steam: Annotated[float | None, Requires("cake.fillings", SET), Requires("fan", False)] = None
    """Litres."""

    def violations(self) -> Iterator[Violation]:
        """Check the heat."""
        if self.degrees > 300:
            yield Violation(("degrees",), "burns; try 300")


@dataclass(frozen=True, kw_only=True)
class Cake:
    """What is baked."""

    minutes: PositiveInt | None = None
    """Time."""
    hours: Annotated[float | None, Requires("minutes", UNSET)] = None
    """The same."""
    fillings: tuple[Text, ...] = ()
    """Inside."""
    oven: Oven = Oven()
    """Heat."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to do."""

    config_file: str | None = None
    """File to read."""


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    """All."""

    job: Job = Job()
    cake: Cake = Cake()

    def violations(self) -> Iterator[Violation]:
        """Check the whole."""
        if (self.cake.minutes or 60) > self.cake.oven.degrees > 0:
            yield Violation(("cake.minutes", "cake.oven.degrees"), "dries; try less")


THEIRS = OldNames(
    renamed={"cake.time": "cake.minutes"},
    refused={"cake.fillings = marzipan": "decorate it yourself"},
    unused={"cake.candles": "decorate it yourself"},
    defaults={"cake.hours": "it takes an hour"},
)


def baked(jobs: Jobs, text: str, *options: str) -> Loaded[Kitchen]:
    return load(Kitchen, ["--job.config_file", jobs.write(text), *options], old_names=THEIRS)


def test_any_tree_is_laid_out() -> None:
    assert list(sections(Kitchen)) == [("job",), ("cake",), ("cake", "oven")]
    steam = keys(Kitchen)["cake", "oven", "steam"]
    text = "Litres. (float; default: not set; needs cake.fillings; needs fan = false)"
    assert (steam.item, steam.is_nullable, describe(steam)) == (float, True, text)


def test_any_tree_is_read_and_written(jobs: Jobs) -> None:
    job = baked(jobs, "[cake]\nfillings = 'jam'\n[cake.oven]\nsteam = 1", "--cake.time=5")
    cake = job.config.cake
    assert (cake.fillings, cake.oven.steam, cake.minutes) == (("jam",), 1.0, 5)
    assert baked(jobs, to_toml(job.config)).config == job.config
    assert [notice.split(": ")[0] for notice in job.notices] == ["command line"]
    [_, notice] = baked(jobs, "[cake]\ntime = 5").notices
    assert "an hour" in notice


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("[cake.oven]\nsteam = 1.0", "[cake.oven] steam", "needs cake.fillings"),
        ("[cake.oven]\ndegrees = 301", "[cake.oven] degrees", "try 300"),
        ("[cake]\nminutes = 201", "[cake] minutes", "try less"),
        ("[cake]\nminutes = 6\nhours = 0.1", "[cake] hours", "minutes"),
        ("[cake]\nfillings = 'marzipan'", "[cake] fillings", "decorate it yourself"),
        ("[cake]\nfilings = 'jam'", "[cake] filings", "did you mean [cake] fillings?"),
        ("[cake]\nminutes = 'x'", "[cake] minutes", "must be an integer"),
    ],
)
def test_mistakes(jobs: Jobs, text: str, key: str, remedy: str) -> None:
    [mistake] = mistakes_of(lambda: baked(jobs, text))
    assert mistake.startswith(f"job.toml: {key} = ")
    assert remedy in mistake


def test_what_has_no_effect_is_told_of_and_needs_nothing_else(jobs: Jobs) -> None:
    text = "[cake.oven]\nfan = true\ndegrees = 0\n[cake]\nminutes = 9"
    [notice] = baked(jobs, text).notices
    assert notice.startswith("job.toml: [cake.oven] fan = true: has no effect")
    [notice, _] = baked(jobs, "[cake]\ncandles = 3").notices
    assert "[cake] candles" in notice


def test_settings_from_python_get_the_types_of_their_keys() -> None:
    kitchen = Kitchen()
    changed = replace(kitchen.cake, fillings="jam", oven=replace(kitchen.cake.oven, steam=1))  # type: ignore[arg-type]
    found = checked(replace(kitchen, cake=changed))
    assert found.cake.fillings == ("jam",)
    assert isinstance(found.cake.oven.steam, float)
    wrong = replace(kitchen, cake=replace(kitchen.cake, minutes="9", fillings=3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=naming("minutes", "fillings")):
        checked(wrong)
