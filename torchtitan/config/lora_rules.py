"""Rules of low-rank adaptation: what is set has to be read."""

from __future__ import annotations

from collections.abc import Iterator

from torchtitan.config.broken import Broken
from torchtitan.job import Config
from torchtitan.lora.settings import LoRAConfig


def lora_rules(config: Config) -> Iterator[Broken]:
    """Check that factors exist where something is said of them, and that the adapter is written."""
    lora, unset = config.lora, LoRAConfig()
    if not lora.rank:
        for key in ("alpha", "modules", "save"):
            if getattr(lora, key) != getattr(unset, key):
                yield Broken(
                    (f"lora.{key}", "lora.rank"),
                    "is of low-rank factors, and lora.rank = 0 makes none; set it, as rank = 8, or "
                    "remove this",
                )
    elif lora.save == "adapter" and not config.checkpoint.last_save_in_hf:
        yield Broken(
            ("lora.save", "checkpoint.last_save_in_hf"),
            "is what checkpoint.last_save_in_hf writes, which is off; set it, or remove this: the "
            "run's own checkpoints hold all",
        )
