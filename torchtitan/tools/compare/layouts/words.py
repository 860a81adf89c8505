"""How a layout is written: `fsdp2`, `pp2,tp2`, `hsdp2x4 --activation_checkpoint.mode=full`.

Words with their number of ranks, joined by commas or spaces, name the axes; every axis that is not
named has one rank, whatever the TOML says. `epN` adds no ranks: experts are dealt out among those
of fsdp, cp and tp, as in `fsdp4,ep2`. Options behind them are the trainer's own.
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
ALONE = ("single", "1")
EP = "expert_parallel_degree"
DEALT_OUT_AMONG = (WORDS["fsdp"][0], WORDS["cp"][0], WORDS["tp"][0])
"""The axes whose ranks share a layer's experts."""
DATA_AXES = WORDS["hsdp"]
_WORD = re.compile(r"([a-z]+)([0-9]+(?:x[0-9]+)*)?")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How ranks share one job."""

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
        return prod(self.degrees[key] for key in DATA_AXES)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The trainer's options for this layout."""
        degrees = (f"--parallelism.{key}={degree}" for key, degree in self.degrees.items())
        return (*degrees, *self.overrides)


def parse_layout(text: str) -> Layout:
    """Read a layout.

    Raises:
        ConfigError: A word is unknown, lacks its number, or sets what another one has set.
    """
    words, overrides = [], []
    for part in _split(text):
        if part.startswith("--"):
            overrides.append(part)
        else:
            words += [word for word in part.split(",") if word]
    if not words:
        raise ConfigError(f"layout '{text}': names no ranks; write single, or {_known()}")
    degrees = dict.fromkeys((key for keys in WORDS.values() for key in keys), 1)
    named: dict[str, str] = {}
    for word in words:
        if word in ALONE:
            if len(words) > 1:
                raise ConfigError(f"layout '{text}': {word} is one device, and stands alone")
            continue
        for key, degree in _degrees(word, layout=text).items():
            if key in named:
                raise ConfigError(f"layout '{text}': {named[key]} and {word} both set {key}")
            named[key], degrees[key] = word, degree
    among = prod(degrees[key] for key in DEALT_OUT_AMONG)
    if among % degrees[EP]:
        raise ConfigError(
            f"layout '{text}': ep adds no ranks, but deals out experts among those of fsdp, cp and "
            f"tp ({among} here), which it must divide, got {degrees[EP]}; write fsdp{degrees[EP]} "
            f"beside it"
        )
    for option in overrides:
        if option_key(option).removeprefix("parallelism.") in degrees:
            raise ConfigError(f"layout '{text}': {option} must be written as a word: {_known()}")
    return Layout(name=text, degrees=degrees, overrides=tuple(overrides))


def option_key(option: str) -> str:
    """`--training.steps=3` -> `training.steps`"""
    return option.removeprefix("--").partition("=")[0]


def fit_local_batch(local: int, *, global_batch_size: int, layout: Layout) -> int:
    """Return the largest local batch up to `local` of which accumulation makes the global one.

    Raises:
        ConfigError: The data-parallel ranks do not divide the global batch.
    """
    per_rank, rest = divmod(global_batch_size, layout.dp)
    if rest:
        nearest = -(-global_batch_size // layout.dp) * layout.dp
        raise ConfigError(
            f"layout '{layout.name}': the global batch must be a multiple of its {layout.dp} "
            f"data-parallel ranks, got {global_batch_size}; give all layouts another, as "
            f"--training.global_batch_size={nearest}"
        )
    return next(size for size in range(min(local, per_rank), 0, -1) if per_rank % size == 0)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"layout '{text}': {error}") from error


def _degrees(word: str, *, layout: str) -> dict[str, int]:
    found = _WORD.fullmatch(word)
    if not found or found[1] not in WORDS:
        hint = "; options are written --section.key=value" if layout.count("--") else ""
        raise ConfigError(f"layout '{layout}': unknown word '{word}'; known: {_known()}{hint}")
    keys = WORDS[found[1]]
    numbers = [int(number) for number in (found[2] or "").split("x") if number]
    if len(numbers) != len(keys) or 0 in numbers:
        example = found[1] + "x".join("2" for _ in keys)
        raise ConfigError(
            f"layout '{layout}': {found[1]} is written with its number of ranks, as {example}, "
            f"got '{word}'"
        )
    return dict(zip(keys, numbers, strict=True))


def _known() -> str:
    examples = (word + "x".join("N" for _ in keys) for word, keys in WORDS.items())
    return ", ".join([*ALONE, *examples])
