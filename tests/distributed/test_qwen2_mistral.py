"""Qwen2 and Mistral train alike in every kind of layout: what biases and windows could break.

Gradients of biases under tensor parallelism are tested with Llama's matrices. Windows are shorter
than the sequences here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.pipeline_jobs import TINY8, assert_same_training, pipeline
from tests.distributed.rank_pool import RankPool

TP2 = "--parallelism.tensor_parallel_degree=2"
WITHIN = "--training.attn_mask_type=block_causal"
CP2 = "--parallelism.context_parallel_degree=2"
ULYSSES = "--parallelism.context_parallel_rotate_method=ulysses"
PP2 = pipeline("1F1B", pipeline_parallel_microbatch_size=2)
COMPILED = "--compile.enable", "--compile.backend=aot_eager"
BY_OPERATOR = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)
LAYOUTS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "fsdp 2, compiled": ("qwen2", (), ("--training.local_batch_size=2", *COMPILED)),
    "tp 2": ("qwen2", (), (TP2,)),
    "tp 2, adapters": ("qwen2", ("--lora.rank=4",), (TP2,)),
    "pp 2": ("qwen2", (), PP2),
    "fsdp 2, recomputed by operator": (
        "mistral",
        (),
        ("--training.local_batch_size=2", *BY_OPERATOR),
    ),
    "tp 2, compiled": ("mistral", (WITHIN,), (TP2, *COMPILED)),
    "pp 2, recomputed": ("mistral", (), (*PP2, "--activation_checkpoint.mode=full")),
    "cp 2, documents": ("mistral", (WITHIN,), (CP2, ULYSSES)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(layout: str, ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    family, shared, arguments = LAYOUTS[layout]
    toml = TINY8.replace("[model]", f'[model]\nname = "{family}"')
    alone, split = (
        [*jobs.write_job(tmp_path, toml, name=name, cache=cache), *shared, jobs.UNSAVED]
        for name in ("alone", "split")
    )
    [on_one_device] = ranks.run(pj.train, alone, world=1)
    assert_same_training(ranks.run(pj.train, [*split, *arguments], world=2), on_one_device)
