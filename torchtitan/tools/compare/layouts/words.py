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
SINGLE = ("single", "1")
KNOWN = ", ".join([*SINGLE, *(word + "x".join("N" for _ in keys) for word, keys in WORDS.items())])
EP = "expert_parallel_degree"
_WORD = re.compile(r"([a-z]+)([0-9]+(?:x[0-9]+)*)?")


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
    """Parse a layout.

    Raises:
        ConfigError: A word is unknown, lacks its number, or sets a degree that is already set.
    """
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"layout '{text}': {error}") from error
    overrides = tuple(part for part in parts if part.startswith("--"))
    words = [word for part in parts if part not in overrides for word in part.split(",") if word]
    if not words:
        raise ConfigError(f"layout '{text}' has no words; write {KNOWN}")
    degrees = dict.fromkeys((key for keys in WORDS.values() for key in keys), 1)
    origin: dict[str, str] = {}
    for word in words:
        if word in SINGLE and len(words) > 1:
            raise ConfigError(f"layout '{text}': {word} means one device, remove the other words")
        for key, degree in ({} if word in SINGLE else _degrees(word, text=text)).items():
            if key in origin:
                raise ConfigError(f"layout '{text}': {origin[key]} and {word} both set {key}")
            origin[key], degrees[key] = word, degree
    num_ranks = prod(degrees[WORDS[axis][0]] for axis in ("fsdp", "cp", "tp"))
    if num_ranks % degrees[EP]:
        raise ConfigError(
            f"layout '{text}': ep distributes experts over the {num_ranks} ranks of fsdp, cp and "
            f"tp, which it must divide, got {degrees[EP]}; add fsdp{degrees[EP]}"
        )
    for option in overrides:
        if option_key(option).removeprefix("parallelism.") in degrees:
            raise ConfigError(f"layout '{text}': write {option} as one of {KNOWN}")
    return Layout(name=text, degrees=degrees, overrides=overrides)


def _degrees(word: str, *, text: str) -> dict[str, int]:
    found = _WORD.fullmatch(word)
    if not found or found[1] not in WORDS:
        hint = "; options are written --section.key=value" if "--" in text else ""
        raise ConfigError(f"layout '{text}': unknown word '{word}'; known: {KNOWN}{hint}")
    keys = WORDS[found[1]]
    numbers = [int(number) for number in (found[2] or "").split("x") if number]
    if len(numbers) != len(keys) or 0 in numbers:
        example = found[1] + "x".join("2" for _ in keys)
        raise ConfigError(f"layout '{text}': write numbers of ranks like {example}, got '{word}'")
    return dict(zip(keys, numbers, strict=True))


def option_key(option: str) -> str:
    """Return the key of an option: `--training.steps=3` -> `training.steps`."""
    return option.removeprefix("--").partition("=")[0]


def fit_local_batch(local: int, *, global_batch_size: int, layout: Layout) -> int:
    """Return the largest local batch up to `local` that divides each rank's share of the batch.

    Raises:
        ConfigError: The data-parallel ranks do not divide the global batch.
    """
    per_rank, rest = divmod(global_batch_size, layout.dp)
    if rest:
        nearest = (per_rank + 1) * layout.dp
        raise ConfigError(
            f"layout '{layout.name}': training.global_batch_size must be a multiple of its "
            f"{layout.dp} data-parallel ranks, got {global_batch_size}; set it for all layouts, "
            f"such as --training.global_batch_size={nearest}"
        )
    return next(size for size in range(min(local, per_rank), 0, -1) if per_rank % size == 0)
