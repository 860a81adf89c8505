"""Which layout a job takes on fewer nodes, against a search of all layouts that would do."""

from __future__ import annotations

from itertools import product

import pytest

from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.elastic import fit_ranks
from torchtitan.mesh.settings import ElasticConfig, ParallelismConfig

BOTH = ("dp_shard", "dp_replicate")


def fit(
    world: int,
    *,
    full: int = 8,
    adjustable_degrees: tuple[str, ...] = ("dp_shard",),
    batch: int = -1,
    **degrees: int,
) -> tuple[tuple[int, int], int] | None:
    """Return ((replicas, shards), global batch) on `world` ranks; None: refused."""
    try:
        parallelism, training = fit_ranks(
            ParallelismConfig(**{f"{name}_degree": n for name, n in degrees.items()}),
            TrainingConfig(local_batch_size=1, global_batch_size=batch),
            settings=ElasticConfig(adjustable_degrees=adjustable_degrees),  # type: ignore[arg-type]
            world_size=world,
            full_world_size=full,
            can_resume=True,
        )
    except ConfigError:
        return None
    replicas = parallelism.data_parallel_replicate_degree
    return (replicas, parallelism.data_parallel_shard_degree), training.global_batch_size


@pytest.mark.parametrize("adjustable_degrees", [(), ("dp_shard",), ("dp_replicate",), BOTH])
@pytest.mark.parametrize(("copies", "tp", "batch"), [*product([1, 2], [1, 2], [8, 16, 24])])
def test_a_layout_is_found_exactly_where_there_is_one(
    adjustable_degrees: tuple[str, ...], copies: int, tp: int, batch: int
) -> None:
    full = 8
    own = copies, full // copies // tp
    if batch % (full // tp):
        return
    for world in range(1, full + 1):
        result = fit(
            world,
            adjustable_degrees=adjustable_degrees,
            batch=batch,
            data_parallel_replicate=copies,
            data_parallel_shard=own[1],
            tensor_parallel=tp,
        )
        found = None if result is None else result[0]
        fits = {
            (replicate, shard)
            for replicate, shard in product(range(1, full + 1), repeat=2)
            if replicate * shard * tp == world
            and batch % (replicate * shard) == 0
            and (replicate == own[0] or "dp_replicate" in adjustable_degrees)
            and (shard == own[1] or "dp_shard" in adjustable_degrees)
        }
        if world == full:
            assert found == own
        elif adjustable_degrees == BOTH and found is not None:
            assert found in fits  # replicas beyond the job's own are tried with its shards only
        else:
            assert found in fits or (found is None and not fits)
        same_shards = {each for each in fits if each[1] == own[1]}
        if same_shards and "dp_replicate" in adjustable_degrees:
            assert found in same_shards  # a rank holds what it held


def test_the_batch_is_that_of_all_nodes_and_is_accumulated() -> None:
    assert fit(4) == ((1, 4), 8)
    assert fit(3) is None  # three ranks cannot share eight samples


def test_the_refusal_names_ranks_and_batch() -> None:
    with pytest.raises(ConfigError, match=naming("[elastic] adjustable_degrees", 3, 8)):
        fit_ranks(
            ParallelismConfig(),
            TrainingConfig(local_batch_size=1),
            settings=ElasticConfig(),
            world_size=3,
            full_world_size=8,
            can_resume=True,
        )
