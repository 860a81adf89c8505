"""Which layout a job takes on fewer nodes, against a search of all layouts that would do."""

from __future__ import annotations

from itertools import product

import pytest

from torchtitan.base.errors import ConfigError
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import resolve_dims
from torchtitan.mesh.elastic import FULL_WORLD_SIZE, Layouts, fit_ranks
from torchtitan.mesh.settings import ElasticConfig, ParallelismConfig

BOTH = ("dp_shard", "dp_replicate")


def layouts(
    full: int, *, may_change: tuple[str, ...] = ("dp_shard",), batch: int = -1, **degrees: int
) -> Layouts:
    return Layouts(
        parallelism=ParallelismConfig(**{f"{name}_degree": n for name, n in degrees.items()}),
        training=TrainingConfig(local_batch_size=1, global_batch_size=batch),
        settings=ElasticConfig(may_change=may_change),  # type: ignore[arg-type]
        full_world_size=full,
    )


def dp_of(job: Layouts, world: int) -> tuple[int, int] | None:
    """Return (copies, shards) on so many ranks."""
    found = job.find(world)
    if found is None:
        return None
    dims = resolve_dims(found[0], world_size=world)
    return dims.dp_replicate, dims.dp_shard


@pytest.mark.parametrize("may_change", [(), ("dp_shard",), ("dp_replicate",), BOTH])
@pytest.mark.parametrize(("copies", "tp", "batch"), [*product([1, 2], [1, 2], [8, 16, 24])])
def test_a_layout_is_found_exactly_where_there_is_one(
    may_change: tuple[str, ...], copies: int, tp: int, batch: int
) -> None:
    full = 8
    own = copies, full // copies // tp
    if batch % (full // tp):
        return
    job = layouts(
        full,
        may_change=may_change,
        batch=batch,
        data_parallel_replicate=copies,
        tensor_parallel=tp,
    )
    assert dp_of(job, full) == own
    for world in range(1, full + 1):
        fits = {
            (replicate, shard)
            for replicate, shard in product(range(1, full + 1), repeat=2)
            if replicate * shard * tp == world
            and batch % (replicate * shard) == 0
            and (replicate == own[0] or "dp_replicate" in may_change)
            and (shard == own[1] or "dp_shard" in may_change)
        }
        found = dp_of(job, world)
        if may_change == BOTH and found is not None:
            assert found in fits  # copies beyond the job's own are not tried but with its shards
        else:
            assert found in fits or (found is None and not fits)
        same_shards = {each for each in fits if each[1] == own[1]}
        if same_shards and "dp_replicate" in may_change:
            assert found in same_shards  # a rank holds what it held


def test_the_batch_is_that_of_all_nodes_and_is_accumulated() -> None:
    job = layouts(8, data_parallel_shard=-1)
    parallelism, training = job.find(4) or pytest.fail("fits")
    assert training.global_batch_size == 8 == job.global_batch_size
    assert parallelism.data_parallel_shard_degree == 4
    assert job.find(3) is None  # three ranks cannot share eight samples


def test_as_many_nodes_train_as_fit_and_others_stand_by() -> None:
    job = layouts(8, batch=16)
    used = [job.nodes_to_use(n, fewest=2, ranks_per_node=2) for n in range(1, 5)]
    assert used == [0, 2, 2, 4]  # six ranks cannot share sixteen samples


def test_nothing_may_change_without_permission() -> None:
    job = layouts(4, may_change=(), batch=12)
    assert [job.nodes_to_use(n, fewest=1, ranks_per_node=1) for n in range(1, 5)] == [0, 0, 0, 4]
    job.check(fewest=1, ranks_per_node=1)  # it waits: no mistake


def test_a_job_that_could_never_go_on_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"may_change.*fits 3 nodes of 2 ranks.*batch of 16.*2, 4"
    ):
        layouts(8, batch=16).check(fewest=3, ranks_per_node=2)


def test_ranks_take_their_degrees_from_what_the_launcher_says() -> None:
    job = layouts(4, data_parallel_shard=4)

    def fit(world: int, environ: dict[str, str]) -> tuple[int, int]:
        parallelism, training = fit_ranks(
            job.parallelism,
            job.training,
            settings=job.settings,
            world_size=world,
            environ=environ,
        )
        return parallelism.data_parallel_shard_degree, training.global_batch_size

    assert fit(3, {}) == (4, -1)  # a fixed number of nodes: as it is written
    assert fit(2, {FULL_WORLD_SIZE: "4"}) == (2, 4)
    with pytest.raises(ConfigError, match=r"no layout of 3 ranks.*global batch of 4"):
        fit(3, {FULL_WORLD_SIZE: "4"})
