"""Write job files and read them, as short as the tests about them should be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchtitan.base.errors import ConfigError
from torchtitan.config.old_names import OLD_NAMES
from torchtitan.config.settings import build, flatten, parse, parse_command_line
from torchtitan.job import Config, load_config


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


@dataclass(frozen=True)
class Checked:
    """Settings, with their mistakes and notices."""

    config: Config
    mistakes: list[str]
    notices: list[str]


def loaded(text: str = "", *options: str, base: str = "") -> Checked:
    """Build from texts as from job.toml on top of base.toml."""
    layers = [
        flatten(parse(toml, origin=name), origin=name, tree=Config)
        for name, toml in (("base.toml", base), ("job.toml", text))
    ]
    layer, stray = parse_command_line(options, tree=Config)
    assert not stray
    result, mistakes = build(Config, [*layers, layer], old_names=OLD_NAMES)
    return Checked(result.config, mistakes, result.notices)


def mistakes_of(load: Callable[[], object]) -> list[str]:
    """Return what is wrong, one message for each mistake."""
    with pytest.raises(ConfigError) as caught:
        load()
    mistakes = list(map(str, caught.value.mistakes))
    assert all("\n" not in mistake for mistake in mistakes)
    assert str(caught.value) == "\n".join(mistakes)
    return mistakes
