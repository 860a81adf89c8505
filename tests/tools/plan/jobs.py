"""Tiny jobs to plan, and the sizes of their model."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch.torch_version import TorchVersion

from torchtitan.tools.plan.devices import DEVICES
from torchtitan.tools.plan.job import Planned, plan_job
from torchtitan.tools.plan.rehearse import rehearse
from torchtitan.tools.plan.tape import Record

L, C, H, KV, F, V = 3, 32, 8, 4, 96, 264
B, S = 8, 64
KV_DIM = C // H * KV
TOKENS = B * S
MATRICES = 2 * C * C + 2 * C * KV_DIM + 3 * C * F
"""Weights of a layer that multiply."""
BLOCK = MATRICES + 2 * C
EMBEDDING, HEAD = V * C, V * C + C
PARAMETERS = L * BLOCK + EMBEDDING + HEAD
TENSORS = 9 * L + 3
BF16, FP32 = 2, 4
TINY = f"""
[model]
flavor = "tiny8"
num_layers = {L}
vocab_size = {V}
tokenizer_path = "byte"
[training]
dataset = "synthetic_masked"
seq_len = {S}
local_batch_size = {B}
mixed_precision_param = "bfloat16"
[activation_checkpoint]
mode = "none"
"""
TP2, CP2, PP2, EP2 = (
    f"--parallelism.{name}_parallel_degree=2"
    for name in ("tensor", "context", "pipeline", "expert")
)
RECOMPUTED = "--activation_checkpoint.mode=full"
IS_OLD = TorchVersion(torch.__version__) < (2, 12)
PIPELINED = pytest.mark.skipif(IS_OLD, reason="the first step of a pipeline sends one more")


def planned(folder: Path, *arguments: str, world: int = 1) -> Planned:
    """Return a job as commands find it, on machines of 2 GPUs."""
    path = folder / "job.toml"
    path.write_text(TINY)
    argv = [f"--job.config_file={path}", *arguments]
    return plan_job(argv, world_size=world, device=DEVICES["H100"], gpus_per_node=2)


@cache
def recorded(*arguments: str, world: int = 1, rank: int = 0) -> Record:
    """Return the record of a step of one rank. Tests share it and leave it as it is."""
    with TemporaryDirectory() as folder:
        short = planned(Path(folder), *arguments, world=world).shortened
    return rehearse(short.config, layout=short.layout, rank=rank)
