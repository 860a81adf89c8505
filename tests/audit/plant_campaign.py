"""Is every bug of `compare --plant` caught? `python -m tests.audit.plant_campaign`.

Four small jobs, so that each bug occurs in at least one layout: a dense model with masked labels
and accumulation, one with tied embeddings, one with experts, and one that draws random numbers.
Takes about ten minutes on two cores. Exit code 0 if each bug occurs and is caught.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtitan.audit import plant
from torchtitan.audit.plants import PLANTS

TOML = Path(__file__).parents[2] / "train_configs" / "compare_layouts.toml"
ACCUMULATES = "--training.local_batch_size=4"
JOBS: dict[str, tuple[str, ...]] = {
    "dense": ("single", "ddp2", "fsdp2", "cp2", "tp2", "pp2", ACCUMULATES),
    "tied": (
        "single",
        "pp2",
        "--model.name=qwen3",
        "--bugs=tied_copy_stale,tied_gradient_not_summed",
    ),
    "experts": (
        "single",
        "fsdp2",
        "--model.name=scripts.expert_campaign:STRONG.deepseek_v3",
        "--model.flavor=tiny",
        "--router.bias_update_rate=0.001",
        "--bugs=router_bias_not_synced",
    ),
    "noisy": (
        "single",
        "single",
        "--training.loss=tests.audit.plant_campaign:noisy_loss",
        "--bugs=rng_not_restored",
    ),
}


def noisy_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits with noise; without it for the few that the trainer tries it on."""
    if len(labels) > 8:
        logits = logits + 0.1 * torch.randn_like(logits)
    return F.cross_entropy(logits, labels, reduction="none")


def main() -> int:
    """Run all jobs, and say what no job has shown."""
    caught: set[str] = set()
    codes = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in JOBS.items():
            sys.stdout.write(f"{name}: {' '.join(words)}\n")
            file = Path(folder) / f"{name}.json"
            codes.append(plant.main([str(TOML), *words, "--steps=4", f"--json={file}"]))
            if file.is_file():
                bugs = json.loads(file.read_text())["bugs"]
                caught |= {each["bug"] for each in bugs if each["caught"]}
    sys.stdout.write(f"caught {len(caught)} of {len(PLANTS)}\n")
    for name in PLANTS.keys() - caught:
        sys.stdout.write(f"NOT SHOWN: {name}\n")
    return int(any(codes) or caught != PLANTS.keys())


if __name__ == "__main__":
    sys.exit(main())
