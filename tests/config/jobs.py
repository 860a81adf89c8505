"""Write job files and read them, as short as the tests about them should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torchtitan.base.errors import ConfigError
from torchtitan.config.load import Loaded, build
from torchtitan.config.sources import flatten, parse, parse_command_line
from torchtitan.job import Config, foreign_names, load_config

THEIRS = foreign_names()


class Jobs:
    """TOML files in a folder of the test's own, the working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str, *, name: str = "job.toml") -> str:
        """Write a file; returns its name."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return name

    def load(self, text: str = "", *options: str) -> Config:
        """Load job.toml with this text."""
        return load_config(["--job.config_file", self.write(text), *options])

    def mistakes(self, text: str = "", *options: str) -> list[str]:
        """Load job.toml with this text, which must fail; returns the messages."""
        return mistakes_of(lambda: self.load(text, *options))


def loaded(text: str = "", *options: str, base: str = "") -> Loaded[Config]:
    """Build from texts as from job.toml on top of base.toml, with mistakes and notices."""
    layers = [
        flatten(parse(one, origin=name), origin=name)
        for name, one in (("base.toml", base), ("job.toml", text))
    ]
    given, stray = parse_command_line(options, tree=Config, renamed=THEIRS.new_names)
    assert not stray
    return build(Config, [*layers, given], foreign=THEIRS)


def mistakes_of(load: Callable[[], object]) -> list[str]:
    """Return what is wrong, one message for each mistake."""
    with pytest.raises(ConfigError) as caught:
        load()
    mistakes = list(map(str, caught.value.mistakes))
    assert all("\n" not in mistake for mistake in mistakes)
    assert str(caught.value) == "\n".join(mistakes)
    return mistakes
