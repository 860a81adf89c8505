"""Every misfit of stages, microbatches and schedule is refused with what would work."""

from __future__ import annotations

import pytest

from torchtitan.base.errors import ConfigError
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.families import MODELS
from torchtitan.models.interface import count
from torchtitan.parallel.pipeline.layout import PipelineLayout, plan_pipeline

LLAMA3 = MODELS["llama3"]
COUNTS = count(LLAMA3.build_meta(LLAMA3.flavors["tiny8"]))


def plan(
    local_batch_size: int = 4,
    *,
    recomputation: str = "none",
    compiles: bool = False,
    **keys: object,
) -> PipelineLayout:
    keys = {"degree": 2, **keys}
    prefixed = {
        key
        if key in ("fsdp_reshard_after_forward", "module_fqns_per_model_part")
        else f"pipeline_parallel_{key}": value
        for key, value in keys.items()
    }
    layout = plan_pipeline(
        ParallelismConfig(**prefixed),  # type: ignore[arg-type]
        num_layers=8,
        counts=COUNTS,
        training=TrainingConfig(local_batch_size=local_batch_size, seq_len=32),
        frees_weights=keys.get("fsdp_reshard_after_forward") == "always",
        recomputation=recomputation,
        compiles=compiles,
    )
    assert layout is not None
    return layout


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [
        ("GPipe", (0, 1)),
        ("1F1B", (0, 1)),
        ("Interleaved1F1B", (0, 1, 0, 1)),
        ("LoopedBFS", (0, 1, 0, 1)),
        ("InterleavedZeroBubble", (0, 1, 0, 1)),
        ("ZBVZeroBubble", (0, 1, 1, 0)),
        ("DualPipeV", (0, 1, 1, 0)),
    ],
)
def test_stages_lie_where_the_schedule_wants_them(schedule: str, ranks: tuple[int, ...]) -> None:
    layout = plan(schedule=schedule)
    assert layout.ranks == ranks
    assert len(layout.modules) == len(ranks)
    assert layout.stages_of(0) == [stage for stage, rank in enumerate(ranks) if rank == 0]


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [
        ("GPipe", 8),
        ("1F1B", 1),
        ("Interleaved1F1B", 1),
        ("LoopedBFS", 8),
        ("InterleavedZeroBubble", 2),
        ("ZBVZeroBubble", 1),
        ("DualPipeV", 1),
    ],
)
def test_losses_that_wait_for_their_backward(schedule: str, in_flight: int) -> None:
    assert plan(8, schedule=schedule).losses_in_flight == in_flight


@pytest.mark.parametrize(
    ("keys", "parts"),
    [
        ({"local_batch_size": 1}, ["1F1B needs at least as many microbatches as stages: 2"]),
        ({"local_batch_size": 3, "schedule": "DualPipeV"}, ["4 for 2 ranks of 2, got 3"]),
        ({"local_batch_size": 5, "schedule": "Interleaved1F1B"}, ["5 do not divide", "4 or 6"]),
        (
            {"module_fqns_per_model_part": [["tok_embeddings"], ["layers.0", "norm", "output"]]},
            ["norm instead of layers.1"],
        ),
        *(
            ({"schedule": "ZBVZeroBubble", key: value}, [name, "ZBVZeroBubble"])
            for key, value, name in (
                ("fsdp_reshard_after_forward", "always", "always"),
                ("recomputation", "full", "[activation_checkpoint] mode"),
                ("compiles", True, "[compile] enable"),
            )
        ),
        ({"last_stage_less_layers": 8}, ["fewer than the model's 8 layers, got 8"]),
    ],
)
def test_refusals(keys: dict[str, object], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        plan(**keys)  # type: ignore[arg-type]
    assert all(part in str(refused.value) for part in parts), refused.value
