"""Tensor parallelism trains the model of one device, alone and under FSDP, HSDP and DDP.

float32, ten steps of 8 samples with a random number of labels masked. The sizes divide by 2 and 4
as tensor parallelism needs them to, and what it leaves of them by hardly anything: key weights of
4 rows on 3 ranks, embeddings of 134.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Replicate

from tests.distributed import jobs
from tests.distributed.jobs import refusal
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_intentions import Beginning, begin
from tests.distributed.test_layouts import assert_same_training
from tests.distributed.test_parts import resized
from torchtitan.assemble import run
from torchtitan.data.dataset import build_dataset
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import load_config
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.optim import clip, loss
from torchtitan.optim.loss import count_valid
from torchtitan.parallel import tensor

SIZES = {"dim": 16, "num_heads": 8, "num_kv_heads": 4, "hidden_dim": 40, "vocab_size": 268}
TIED = {**SIZES, "tie_embeddings": True}
QWEN3 = {**SIZES, "own_head_dim": 6}
STEPS = "--training.steps=10"
UNCLIPPED = "--training.max_norm=inf"
TP2 = "--parallelism.tensor_parallel_degree=2"
TP4 = "--parallelism.tensor_parallel_degree=4"
COPIED_STREAM = "--parallelism.enable_sequence_parallel=false"
WHOLE_LOGITS = "--parallelism.disable_loss_parallel=true"
CHUNKS = "--training.loss_chunks=3"
BATCH_12 = ("--training.local_batch_size=1", "--training.global_batch_size=12")

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp 2": (2, (TP2,)),
    "tp 2, stream copied": (2, (TP2, COPIED_STREAM)),
    "tp 2, logits gathered": (2, (TP2, WHOLE_LOGITS)),
    "tp 4": (4, (TP4,)),
    "tp 4, stream copied, logits gathered": (4, (TP4, COPIED_STREAM, WHOLE_LOGITS)),
    "fsdp 2, tp 2": (4, (TP2,)),
    "fsdp 2, tp 2, accumulating": (4, (TP2, "--training.local_batch_size=1")),
    "fsdp 2, tp 2, recomputed": (4, (TP2, "--activation_checkpoint.mode=full")),
    "fsdp 2, tp 2, offloaded": (4, (TP2, "--training.enable_cpu_offload")),
    "ddp 2, tp 2, half recomputed": (
        4,
        (TP2, *jobs.DDP, "--activation_checkpoint.mode=selective"),
    ),
    "hsdp 2x2, tp 2": (8, (TP2, *jobs.HSDP)),
    "fsdp 3, tp 2": (6, (TP2, *BATCH_12)),
}
Bug = tuple[Any, str, Any]


@pytest.fixture(scope="module")
def on_one_device(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Callable[..., jobs.Result]:
    """Return the reference for sizes and settings, trained once."""
    results: dict[str, jobs.Result] = {}

    def reference(sizes: dict[str, int], *overrides: str) -> jobs.Result:
        key = f"{sizes} {overrides}"
        if key not in results:
            folder = tmp_path_factory.mktemp("one")
            job = [*jobs.write_job(folder, cache=cache), STEPS, *overrides]
            [results[key]] = ranks.run(resized, jobs.train, sizes, job, world=1)
        return results[key]

    return reference


def assert_same(result: jobs.Result, reference: jobs.Result) -> None:
    assert result.initial.keys() == reference.initial.keys()
    for name, weights in result.initial.items():
        assert torch.equal(weights, reference.initial[name]), name
    assert_same_training(result, reference)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: Callable[..., jobs.Result],
) -> None:
    world, overrides = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, cache=cache), STEPS, *overrides]
    result = ranks.run(resized, jobs.train, SIZES, job, world=world)[0]
    batch = [argument for argument in overrides if argument in BATCH_12]
    assert_same(result, on_one_device(SIZES, *batch if len(batch) == 2 else ()))


@pytest.mark.parametrize("layout", ["tp 2", "tp 2, stream copied", "fsdp 2, tp 2"])
@pytest.mark.parametrize("logits", [(), (WHOLE_LOGITS,)], ids=["split", "gathered"])
def test_tied_embeddings_and_no_clipping(
    layout: str,
    logits: tuple[str, ...],
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: Callable[..., jobs.Result],
) -> None:
    world, overrides = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, cache=cache), STEPS, *overrides, *logits, UNCLIPPED, CHUNKS]
    result = ranks.run(resized, jobs.train, TIED, job, world=world)[0]
    assert "output.weight" not in result.final
    assert_same(result, on_one_device(TIED, UNCLIPPED))


def test_the_model_with_eight_layers_and_its_own_sizes(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    toml = jobs.TINY.replace('"tiny"', '"tiny8"')
    results = {}
    for world, overrides in ((1, ()), (4, (TP4,))):
        job = jobs.write_job(tmp_path, toml, name=f"tp{world}", cache=cache)
        job = [*job, "--training.steps=3", *overrides]
        results[world] = ranks.run(jobs.train, job, world=world)[0]
    assert_same(results[4], results[1])


def gradients(job: list[str]) -> dict[str, Tensor]:
    """Return what the first step leaves in every parameter before clipping."""
    run = jobs.start(job)
    batches = [run.shard.take(samples) for samples in next(run.loader)]
    num_valid = torch.stack([count_valid(batch.labels) for batch in batches]).sum()
    dist.all_reduce(num_valid)
    divisor = num_valid // (run.mesh.dims.pp * run.mesh.dims.tp)
    run.execution.forward_backward(batches, divisor=divisor)
    run.loader.close()
    return {name: jobs.full(p.grad) for name, p in run.model.named_parameters()}


def float64_gradients(job: list[str]) -> dict[str, Tensor]:
    """Return the same by plain PyTorch."""
    config = load_config(job)
    dataset = build_dataset(config.training, tokenizer=build_tokenizer("byte"), seed=0)
    spec = MODELS[config.model.name]
    model = spec.build(spec.flavors["tiny"])
    initialize(model, seed=0)
    model.double()
    batch = [dataset[k] for k in range(8)]
    tokens = torch.stack([sample["tokens"] for sample in batch])
    labels = torch.stack([sample["labels"] for sample in batch])
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("family", "sizes"),
    [("llama3", SIZES), ("llama3", TIED), ("qwen3", QWEN3)],
    ids=["untied", "tied", "qwen3"],
)
@pytest.mark.parametrize(
    "layout", ["tp 2", "tp 4, stream copied, logits gathered", "fsdp 2, tp 2, accumulating"]
)
def test_every_parameters_gradient(
    layout: str, family: str, sizes: dict[str, int], ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    world, overrides = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, cache=cache), f"--model.name={family}"]
    results = ranks.run(resized, gradients, sizes, [*job, *overrides], world=world)
    [expected] = ranks.run(resized, float64_gradients, sizes, job, world=1)
    for result in results:
        assert result.keys() == expected.keys()
        for name, grad in result.items():
            error = (grad - expected[name]).norm() / expected[name].norm()
            assert error < 2e-6, f"{name} is off by {error}"


def norms_take_their_part_for_a_copy() -> Bug:
    correct = tensor._Norm
    return tensor, "_Norm", lambda stream: correct(Replicate())


def the_largest_logit_is_not_shared() -> Bug:
    planted = SimpleNamespace(**vars(dist))

    def all_reduce(value: Tensor, op: object = dist.ReduceOp.SUM, **arguments: Any) -> None:
        if op != dist.ReduceOp.MAX:
            dist.all_reduce(value, op, **arguments)

    planted.all_reduce = all_reduce
    return loss, "dist", planted


def each_rank_counts_the_loss() -> Bug:
    correct = loss.build_loss

    def build_loss(*args: Any, **settings: Any) -> Callable[..., Tensor]:
        return lambda *inputs: correct(*args, **settings)(*inputs) * 2

    return run, "build_loss", build_loss


def copies_count_as_often_as_they_are_held() -> Bug:
    return clip, "_num_copies", lambda grad: 1


def gathered_inputs_keep_their_own_ranks_gradient() -> Bug:
    correct = tensor._wrapped

    def wrapped(local: Tensor, mesh: Any, placement: Any) -> Any:
        if placement.is_shard():
            return correct(local, mesh, placement)
        return correct(local.detach() + (local - local.detach()) / 2, mesh, placement)

    return tensor, "_wrapped", wrapped


BUGS = {
    norms_take_their_part_for_a_copy: "tp 2",
    the_largest_logit_is_not_shared: "tp 2",
    each_rank_counts_the_loss: "tp 2",
    copies_count_as_often_as_they_are_held: "fsdp 2, tp 2",
    gathered_inputs_keep_their_own_ranks_gradient: "tp 2, stream copied",
}


def train_with(bug: Callable[[], Bug], job: list[str]) -> jobs.Result:
    """Train while a bug stands in the place of the correct code."""
    module, name, planted = bug()
    correct = getattr(module, name)
    setattr(module, name, planted)
    try:
        return resized(jobs.train, SIZES, job)
    finally:
        setattr(module, name, correct)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_seen(
    bug: Callable[[], Bug],
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: Callable[..., jobs.Result],
) -> None:
    world, overrides = LAYOUTS[BUGS[bug]]
    job = [*jobs.write_job(tmp_path, cache=cache), "--training.steps=2", *overrides]
    result = ranks.run(train_with, bug, job, world=world)[0]
    first, correct = result.rows[0], on_one_device(SIZES).rows[0]
    assert first["grad_norm"] != pytest.approx(correct["grad_norm"], rel=1e-3)


def test_bfloat16_trains_alike(
    ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: Callable[..., jobs.Result]
) -> None:
    """Within the rounding of bfloat16, 2^-8, of one device, whose sums it takes in parts."""
    precision = "--training.mixed_precision_param=bfloat16"
    job = [*jobs.write_job(tmp_path, cache=cache), STEPS, TP2, precision]
    result = ranks.run(resized, jobs.train, SIZES, job, world=4)[0]
    losses = [row["loss"] for row in result.rows]
    assert losses == pytest.approx([row["loss"] for row in on_one_device(SIZES).rows], rel=2**-8)
    assert losses != pytest.approx([row["loss"] for row in on_one_device(SIZES).rows], rel=1e-6)


RESHARDING: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp 2, tp 2": LAYOUTS["fsdp 2, tp 2"],
    "one device": (1, ()),
    "tp 4": LAYOUTS["tp 4"],
    "fsdp 3, tp 2": LAYOUTS["fsdp 3, tp 2"],
    "fsdp 4": (4, jobs.FSDP),
}


def assert_equal(loaded: Beginning, saved: Beginning) -> None:
    assert loaded.model.keys() == saved.model.keys()
    assert loaded.optimizer.keys() == saved.optimizer.keys()
    assert all(loaded.model[n].equal(t) for n, t in saved.model.items())
    assert all(loaded.optimizer[n].equal(t) for n, t in saved.optimizer.items())
    assert (loaded.step, loaded.position) == (saved.step, saved.position)


@pytest.mark.parametrize("source", RESHARDING)
def test_a_checkpoint_loads_into_other_layouts(
    source: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*jobs.write_job(tmp_path, cache=cache), BATCH_12[1]]
    one = "--training.local_batch_size=1"
    world, overrides = RESHARDING[source]
    two_steps = [*job, *overrides, one, "--training.steps=2"]
    [trained, *_] = ranks.run(resized, jobs.train, SIZES, two_steps, world=world)
    [saved, *_] = ranks.run(resized, begin, SIZES, [*job, *overrides, one], world=world)
    assert all(saved.model[n].equal(t) for n, t in trained.final.items())
    assert any(t.any() for n, t in saved.optimizer.items() if n.endswith(".exp_avg"))
    targets = list(RESHARDING)
    for step in (1, 2):
        world, overrides = RESHARDING[targets[(targets.index(source) + step) % len(targets)]]
        for loaded in ranks.run(resized, begin, SIZES, [*job, *overrides, one], world=world):
            assert_equal(loaded, saved)


def test_training_goes_on_in_another_layout_and_back(
    ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: Callable[..., jobs.Result]
) -> None:
    job = jobs.write_job(tmp_path, cache=cache)
    parts = [("fsdp 2, tp 2", 3), ("one device", 5), ("tp 4", 7), ("fsdp 2, tp 2", 10)]
    for layout, steps in parts:
        world, overrides = RESHARDING[layout]
        part = [*job, *overrides, f"--training.steps={steps}"]
        result = ranks.run(resized, jobs.train, SIZES, part, world=world)[0]
    assert_same_training(result, on_one_device(SIZES))


def test_a_run_that_was_stopped_goes_on_bit_for_bit(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    world, overrides = LAYOUTS["fsdp 2, tp 2"]
    hashes = {}
    for name, stops in (("whole", (4,)), ("stopped", (2, 4))):
        for stop in stops:
            job = [*jobs.write_job(tmp_path, name=name, cache=cache), *overrides]
            job.append(f"--training.steps={stop}")
            [result, *_] = ranks.run(resized, jobs.train, SIZES, job, world=world)
        hashes[name] = result.state_hash
    assert hashes["whole"] == hashes["stopped"]


def test_sizes_that_do_not_divide_are_refused_before_any_data_is_read(
    ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), TP2, "--training.seq_len=31"]
    for message in ranks.run(refusal, job, world=2):
        assert "got 2 for vocab_size 263; this model can be split by 1" in message
        assert "try 30, or set parallelism.enable_sequence_parallel = false" in message
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run").exists()
