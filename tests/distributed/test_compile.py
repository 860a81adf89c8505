"""Compiled blocks train what plain ones do, in every layout, and all layers run one code.

Most jobs take the backend `aot_eager`: it does all that the compiler does, tracing blocks, their
collectives and their backward, but for the writing of kernels, and in a tenth of the time. Two take
`inductor`, which fuses operators and so rounds otherwise: what layouts may differ by is allowed
here too. Its kernels are without vector instructions, which compile in half the time. The model is
that of `pipeline_jobs`, in float32, unclipped; the references are plain.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.distributed import jobs, pipeline_jobs
from tests.distributed.conftest import OneDevice
from tests.distributed.pipeline_jobs import Trained, assert_same_training
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY8, UNSAVED, pipeline

pytestmark = pytest.mark.slow

UNCLIPPED = ("--training.max_norm=inf", "--training.steps=2", "--training.local_batch_size=8")
AOT_EAGER = ("--compile.enable", "--compile.backend=aot_eager")
TP2 = "--parallelism.tensor_parallel_degree=2"
COPIED_STREAM = "--parallelism.enable_sequence_parallel=false"
CP2 = (
    "--parallelism.context_parallel_degree=2",
    "--parallelism.context_parallel_rotate_method=ring",
)
FULL = "--activation_checkpoint.mode=full"
SELECTIVE = "--activation_checkpoint.mode=selective"
BY_OPERATOR = (SELECTIVE, "--activation_checkpoint.selective_ac_option=op")


LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device, half recomputed": (1, (SELECTIVE,)),
    "fsdp 2, by operator": (2, (*BY_OPERATOR, "--training.local_batch_size=4")),
    "pp 2, recomputed": (2, (*pipeline("1F1B", pipeline_parallel_microbatch_size=4), FULL)),
    "tp 2, stream copied": (2, (TP2, COPIED_STREAM)),
}


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A training, and what the compiler counted."""

    trained: Trained
    graphs: int
    breaks: int
    cache_hits: int
    cache_misses: int


def train(job: list[str], *, code: Path | None = None) -> Compiled:
    """Train on this rank; a second code for a later layer is an error."""
    import torch._dynamo
    import torch._inductor.config
    from torch._dynamo.utils import counters

    if code is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(code)
    torch._dynamo.reset()
    counters.clear()
    scalar = torch._inductor.config.patch({"cpp.simdlen": 1})
    with torch._dynamo.config.patch(error_on_recompile=True), scalar:
        trained = pipeline_jobs.train(job)
    return Compiled(
        trained=trained,
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(counters["graph_break"].values()),
        cache_hits=counters["inductor"]["fxgraph_cache_hit"],
        cache_misses=counters["inductor"]["fxgraph_cache_miss"],
    )


@pytest.fixture
def plain(on_one_device: OneDevice) -> Trained:
    """The reference: one device, nothing compiled."""
    result: Trained = on_one_device(pipeline_jobs.train, *UNCLIPPED)
    return result


@pytest.fixture
def job(tmp_path: Path, cache: Path) -> list[str]:
    return [*jobs.write_job(tmp_path, TINY8, cache=cache), *UNCLIPPED, UNSAVED]


@pytest.mark.promise("mixes", "compile")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_model_from_one_code(
    name: str, ranks: RankPool, job: list[str], plain: Trained
) -> None:
    world, how = LAYOUTS[name]
    results = ranks.run(train, [*job, *how, *AOT_EAGER], world=world)
    # names are compared too
    assert_same_training([result.trained for result in results], plain)
    # one of the blocks, and two of the loss on ranks that have it
    graphs = {(1, 0), (3, 0)} if name.startswith("pp") else {(3, 0)}
    assert {(result.graphs, result.breaks) for result in results} == graphs


@pytest.mark.promise("compile")
def test_documents_change_with_each_batch_and_compile_nothing(
    ranks: RankPool, job: list[str], on_one_device: OneDevice
) -> None:
    """Attention that goes by their lengths is not compiled; that would be anew for each batch.

    The graph breaks there twice, once for attention and once for the block around it, and leaves
    the parts before and after it in both. The loss has two graphs."""
    within = "--training.attn_mask_type=block_causal"
    reference = on_one_device(pipeline_jobs.train, *UNCLIPPED, within)
    results = ranks.run(train, [*job, within, *AOT_EAGER, *CP2], world=2)
    assert_same_training([result.trained for result in results], reference)
    assert {(result.graphs, result.breaks) for result in results} == {(6, 2)}


def digits(result: jobs.Result) -> list[tuple[float, float, float]]:
    return [(row["step"], row["loss"], row["grad_norm"]) for row in result.rows]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which inductor keeps what it has compiled."""
    return tmp_path_factory.mktemp("code")


def train_in_two_parts(job: list[str], *, code: Path) -> Compiled:
    """Stop after a step, and go on."""
    train([*job, "--training.steps=1"], code=code)
    return train(job, code=code)


def train_anew(
    job: list[str], *, code: Path, world: int, how: Callable[..., Compiled] = train
) -> list[Compiled]:
    """Train in new processes."""
    pool = RankPool(world)
    try:
        return pool.run(how, [*job, "--compile.enable"], code=code, world=world, timeout=500)
    finally:
        pool.close()


@pytest.mark.promise("compile")
@pytest.mark.timeout(600)
@pytest.mark.long
def test_inductor_trains_the_same_and_later_starts_compile_nothing(
    tmp_path: Path, cache: Path, code: Path, plain: Trained
) -> None:
    found, libraries = {}, []
    for name, how in (("first", train), ("second", train_in_two_parts)):
        job = [*jobs.write_job(tmp_path, TINY8, name=name, cache=cache), *UNCLIPPED, SELECTIVE]
        [found[name]] = train_anew(job, code=code, world=1, how=how)
        libraries.append({path.name for path in code.rglob("*.so")})
    first, second = found["first"], found["second"]
    assert_same_training([first.trained], plain)
    # a graph for forward and one for backward, and two of the loss
    assert (first.cache_hits, first.cache_misses) == (0, 4)
    assert (second.cache_hits, second.cache_misses) == (4, 0)
    assert libraries[0] == libraries[1] != set()
    assert digits(first.trained) == digits(second.trained)
    for name, weight in first.trained.final.items():
        assert torch.equal(weight, second.trained.final[name]), name


@pytest.mark.timeout(600)
@pytest.mark.long
def test_inductor_under_tensor_parallelism(job: list[str], code: Path, plain: Trained) -> None:
    results = train_anew([*job, TP2], code=code, world=2)
    assert_same_training([result.trained for result in results], plain)
    assert [(result.graphs, result.breaks) for result in results] == [(3, 0), (3, 0)]
