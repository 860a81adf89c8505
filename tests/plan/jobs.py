"""Tiny jobs to plan."""

from __future__ import annotations

from pathlib import Path

from torchtitan.assemble.find import find_layout
from torchtitan.assemble.model import resolve_model
from torchtitan.job import Config, load_config
from torchtitan.parallel.layout import Layout

TINY = """
[model]
flavor = "tiny8"
vocab_size = 264
tokenizer_path = "byte"
[training]
dataset = "synthetic_masked"
seq_len = 64
local_batch_size = 8
steps = 20
mixed_precision_param = "bfloat16"
[lr_scheduler]
warmup_steps = 2
[activation_checkpoint]
mode = "none"
"""


def planned(folder: Path, *arguments: str, world: int = 1) -> tuple[Config, Layout]:
    """Return a job and its layout, as commands find them."""
    path = folder / "tiny.toml"
    path.write_text(TINY)
    config = resolve_model(load_config([f"--job.config_file={path}", *arguments]))
    return config, find_layout(config, world_size=world)
