"""The engine over a tree that is not ours, with the keys of a program that is not torchtitan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pytest
from annotated_types import Ge

from tests.config.jobs import Jobs, mistakes_of
from tests.naming import naming
from torchtitan.base.errors import ConfigError, Violation
from torchtitan.config.foreign import Foreign, read_foreign
from torchtitan.config.help import describe
from torchtitan.config.load import Loaded, load
from torchtitan.config.schema import (
    GIVEN,
    PositiveInt,
    Replaces,
    Requires,
    Text,
    keys,
    sections,
)
from torchtitan.config.sources import to_toml
from torchtitan.config.typed import with_types


@dataclass(frozen=True, kw_only=True)
class Oven:
    """Heat."""

    degrees: PositiveInt = 200
    """In Celsius."""
    fan: Annotated[bool, Requires("degrees", Ge(100), is_notice=True)] = False
    """Blow."""
    steam: Annotated[float | None, Requires("cake.fillings", GIVEN), Requires("fan", False)] = None
    """Litres."""

    def violations(self) -> Iterator[Violation]:
        """Check the heat."""
        if self.degrees > 300:
            yield Violation(("degrees",), "burns; try 300")


@dataclass(frozen=True, kw_only=True)
class Cake:
    """What is baked."""

    minutes: PositiveInt = 60
    """Time."""
    hours: Annotated[float | None, Replaces("minutes")] = None
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
        if self.cake.minutes > self.cake.oven.degrees:
            yield Violation(("cake.minutes", "cake.oven.degrees"), "dries; try less")


TABLE = """
[renamed]
"cake.time" = {to = "cake.minutes", ignored = [0]}
[earlier_names]
"cake.wind" = {to = "cake.oven.fan", values = {on = true, off = false}}
[switches]
"cake.candles" = "cake.oven.fan"
[features.decoration]
instead = "decorate it yourself"
keys."cake.candles" = [0]
values."cake.fillings" = ["marzipan"]
"""


@pytest.fixture
def theirs(tmp_path: Path) -> Foreign:
    file = tmp_path / "theirs.toml"
    file.write_text(TABLE)
    return read_foreign(file, program="bakery")


def baked(jobs: Jobs, theirs: Foreign, text: str, *options: str) -> Loaded[Kitchen]:
    return load(Kitchen, ["--job.config_file", jobs.write(text), *options], foreign=theirs)


def test_any_tree_is_laid_out() -> None:
    assert list(sections(Kitchen)) == [("job",), ("cake",), ("cake", "oven")]
    steam = keys(Kitchen)["cake", "oven", "steam"]
    text = "Litres. (float; default: not set; needs cake.fillings; needs fan = false)"
    assert (steam.kind, steam.optional, describe(steam)) == (float, True, text)


@pytest.mark.parametrize("words", [("[cake]\nwind = 'on'",), ("", "--cake.wind=on")])
def test_an_earlier_name_and_its_values(
    jobs: Jobs, theirs: Foreign, words: tuple[str, ...]
) -> None:
    loaded = baked(jobs, theirs, *words)
    assert loaded.config.cake.oven.fan is True
    assert loaded.foreign_file is None  # it is no file of another program
    with pytest.raises(ConfigError, match=r'\[cake\] wind = "strong"'):
        baked(jobs, theirs, "[cake]\nwind = 'strong'")


def test_any_tree_is_read_and_written(jobs: Jobs, theirs: Foreign) -> None:
    job = baked(jobs, theirs, "[cake]\nfillings = 'jam'\n[cake.oven]\nsteam = 1", "--cake.time=5")
    cake = job.config.cake
    assert (cake.fillings, cake.oven.steam, cake.minutes) == (("jam",), 1.0, 5)
    assert baked(jobs, theirs, to_toml(job.config)).config == job.config
    assert [notice.split(": ")[0] for notice in job.notices] == ["command line"]
    assert baked(jobs, theirs, "[cake]\ntime = 0").config.cake.minutes == 60


@pytest.mark.parametrize(
    ("text", "key", "remedy"),
    [
        ("[cake.oven]\nsteam = 1.0", "[cake.oven] steam", "needs cake.fillings"),
        ("[cake.oven]\ndegrees = 301", "[cake.oven] degrees", "try 300"),
        ("[cake]\nminutes = 201", "[cake] minutes", "try less"),
        ("[cake]\nminutes = 6\nhours = 0.1", "[cake] hours", "remove one"),
        ("[cake]\nfillings = 'marzipan'", "[cake] fillings", "decorate it yourself"),
        ("[cake.oven]\nfan = true\n[cake]\ncandles = 3", "[cake] candles", "only 0 is accepted"),
        ("[cake]\nfilings = 'jam'", "[cake] filings", "did you mean [cake] fillings?"),
        ("[cake]\nminutes = 'x'", "[cake] minutes", "must be an integer"),
    ],
)
def test_mistakes(jobs: Jobs, theirs: Foreign, text: str, key: str, remedy: str) -> None:
    [mistake] = mistakes_of(lambda: baked(jobs, theirs, text))
    assert mistake.startswith(f"job.toml: {key} = ")
    assert remedy in mistake


def test_what_has_no_effect_is_told_of_and_needs_nothing_else(jobs: Jobs, theirs: Foreign) -> None:
    text = "[cake.oven]\nfan = true\ndegrees = 90\n[cake]\nminutes = 9"
    [notice] = baked(jobs, theirs, text).notices
    assert notice.startswith("job.toml: [cake.oven] fan = true: has no effect")
    [notice] = baked(jobs, theirs, "[cake]\ncandles = 3").notices
    assert "cake.oven.fan" in notice


def test_settings_from_python_get_the_types_of_their_keys() -> None:
    kitchen = Kitchen()
    changed = replace(kitchen.cake, fillings="jam", oven=replace(kitchen.cake.oven, steam=1))  # type: ignore[arg-type]
    found = with_types(replace(kitchen, cake=changed))
    assert found.cake.fillings == ("jam",)
    assert isinstance(found.cake.oven.steam, float)
    wrong = replace(kitchen, cake=replace(kitchen.cake, minutes="9", fillings=3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=naming("minutes", "fillings")):
        with_types(wrong)
    with pytest.raises(ConfigError, match="cake"):
        with_types(replace(kitchen, cake=None))  # type: ignore[arg-type]
