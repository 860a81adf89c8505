"""The notation of layouts: `fsdp2`, `pp2,tp2`, `hsdp2x4 --activation_checkpoint.mode=full`.

Words with numbers of ranks, joined by commas or spaces, name the axes. Every other axis has one
rank, also if the TOML sets another degree. `epN` adds no ranks: it distributes experts over the
ranks of fsdp, cp and tp, as in `fsdp4,ep2`. Options of the trainer may follow.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torchtitan.base.errors import ConfigError

WORDS: Mapping[str, tuple[str, ...]] = {
    "fsdp": ("data_parallel_shard_degree",),
    "ddp": ("data_parallel_replicate_degree",),
    "hsdp": ("data_parallel_replicate_degree", "data_parallel_shard_degree"),
    "tp": ("tensor_parallel_degree",),
    "pp": ("pipeline_parallel_degree",),
    "cp": ("context_parallel_degree",),
    "ep": ("expert_parallel_degree",),
}
"""The keys of [parallelism] that a word sets, one for each of its numbers."""
RULE = "must be single, or have words of fsdpN, ddpN, hsdpNxN, tpN, ppN, cpN, epN, each axis once"
EP = "expert_parallel_degree"
_WORD = re.compile(r"([a-z]+)([1-9][0-9]*(?:x[1-9][0-9]*)*)")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout of one job."""

    name: str
    """As it was written."""
    degrees: Mapping[str, int]
    """Every degree of [parallelism] by key."""
    overrides: tuple[str, ...]
    """Further options of the trainer."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(degree for key, degree in self.degrees.items() if key != EP)

    @property
    def dp(self) -> int:
        """Number of ranks that read different samples."""
        return prod(self.degrees[key] for key in WORDS["hsdp"])

    @property
    def arguments(self) -> tuple[str, ...]:
        """The trainer's options for this layout."""
        degrees = (f"--parallelism.{key}={degree}" for key, degree in self.degrees.items())
        return (*degrees, *self.overrides)


def parse_layout(text: str) -> Layout:
    """Parse a layout; raise ConfigError if a word is unknown, lacks its number, or sets a degree
    that is already set."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"layout '{text}': {error}") from error
    overrides = tuple(part for part in parts if part.startswith("--"))
    words = [word for part in parts if part not in overrides for word in part.split(",") if word]
    numbers_of: dict[str, int] = {}
    for word in [] if words in (["single"], ["1"]) else words:
        match = _WORD.fullmatch(word)
        keys = WORDS.get(match[1], ()) if match else ()
        numbers = [int(number) for number in match[2].split("x")] if match else []
        if not keys or len(numbers) != len(keys) or numbers_of.keys() & {*keys}:
            raise ConfigError(f"layout '{text}' {RULE}, got {word}")
        numbers_of |= zip(keys, numbers, strict=True)
    degrees = dict.fromkeys((key for keys in WORDS.values() for key in keys), 1) | numbers_of
    settings = [option_key(option).removeprefix("parallelism.") for option in overrides]
    if not words or {*settings} & degrees.keys():
        raise ConfigError(f"layout '{text}' {RULE}, got {' '.join(overrides)}")
    return Layout(name=text, degrees=degrees, overrides=overrides)


def option_key(option: str) -> str:
    """Return the key of an option: `--training.steps=3` -> `training.steps`."""
    return option.removeprefix("--").partition("=")[0]
