"""Fake equals real: what is rehearsed on fake tensors is what ranks do.

A step is run twice: on real tensors, by gloo ranks, and on fake ones, by a single process that
pretends the other ranks. What a tape notes of both must be equal, event for event: each birth and
death of a storage, each message, product and pass, its size, its operator and its module, in this
order; what dies at once, with nothing between, dies in any. So peaks, traffic and arithmetic are
equal too.

What the tape itself overlooks is overlooked in both, so torch's profiler counts real memory beside
it, and rows are sent to experts by the trainer's own exchange.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, groupby, zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import wait_tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.distributed import jobs
from tests.distributed.jobs import write_job
from tests.distributed.rank_pool import RankPool
from tests.jobs import DDP, HSDP, TINY, pipeline
from torchtitan.job import Config, load_config
from torchtitan.layout import find_layout
from torchtitan.mesh.dims import build_mesh
from torchtitan.models.init import local_part
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.pipeline import schedules
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.plan.devices import DEVICES
from torchtitan.tools.plan.job import plan_job
from torchtitan.tools.plan.memory import staged
from torchtitan.tools.plan.ranks import rehearse_rank
from torchtitan.tools.plan.rehearse import record_step, rehearse
from torchtitan.tools.plan.tape import MESSAGES, Entry, Record, Tape
from torchtitan.trainer import Trainer

TOML = TINY.replace("global_batch_size = 8", "").replace("size = 2", "size = 4")
TP2 = "--parallelism.tensor_parallel_degree=2"
COPIED = "--parallelism.enable_sequence_parallel=false"
WHOLE_LOGITS = "--parallelism.disable_loss_parallel=true"
BF16 = "--training.mixed_precision_param=bfloat16"
RECOMPUTED = "--activation_checkpoint.mode=full"
SELECTIVE = "--activation_checkpoint.mode=selective"
BY_OPERATOR = (SELECTIVE, "--activation_checkpoint.selective_ac_option=op")
EXPERTS = ("--model.name=qwen3_moe", "--model.flavor=tiny8", "--model.num_layers=2")
DEEPSEEK = ("--model.name=deepseek_v3", "--model.flavor=tiny")
WIDE = "--model.vocab_size=264"
EP2 = "--parallelism.expert_parallel_degree=2"
EP4 = "--parallelism.expert_parallel_degree=4"
IN_TWOS = "--parallelism.pipeline_parallel_microbatch_size=2"
LAYERS4 = ("--model.flavor=tiny8", "--model.num_layers=4")


def cp(degree: int, method: str) -> tuple[str, ...]:
    return (
        f"--parallelism.context_parallel_degree={degree}",
        f"--parallelism.context_parallel_rotate_method={method}",
    )


RNG_STATE = 5056
"""Bytes of the CPU's generator, which a block keeps to be recomputed; no operator makes them."""
FEW = 200
"""Bytes of numbers of rows by expert, which are converted without an operator."""
TINY = 64
"""Bytes of scalars that torch has kept from earlier jobs of the same process: 40 were seen."""
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one device": (1, ()),
    "one device, bfloat16": (1, (BF16,)),
    "one device, recomputed": (1, (RECOMPUTED,)),
    "one device, documents": (1, ("--training.attn_mask_type=block_causal",)),
    "one device, bfloat16, chunks": (
        1,
        (BF16, "--training.loss_chunks=3", *LAYERS4, "--model.vocab_size=4096", "--model.dim=512"),
    ),
    "one device, accumulating": (1, ("--training.global_batch_size=8",)),
    "fsdp 2": (2, ()),
    "fsdp 4, bfloat16, recomputed": (4, (BF16, RECOMPUTED)),
    "fsdp 2, offloaded": (2, ("--training.enable_cpu_offload=true",)),
    "fsdp 2, frozen": (2, ('--optimizer.frozen_params=["tok_embeddings.*","layers.0.*"]',)),
    "fsdp 2, lora": (2, ("--lora.rank=4", "--lora.alpha=8.0")),
    "ddp 2": (2, DDP),
    "hsdp 2x2, bfloat16": (4, (*HSDP, BF16)),
    "tp 2, stream copied": (2, (TP2, COPIED, *LAYERS4)),
    "tp 2, logits gathered": (2, (TP2, WHOLE_LOGITS, *LAYERS4)),
    "fsdp 2 x tp 2, bfloat16": (4, (TP2, BF16, *LAYERS4)),
    "cp 2 ring, by operator": (2, (*cp(2, "alltoall"), *BY_OPERATOR)),
    "cp 2 ulysses": (2, cp(2, "ulysses")),
    "cp 2 ulysses, documents": (2, (*cp(2, "ulysses"), "--training.attn_mask_type=block_causal")),
    "fsdp 2 x cp 2, bfloat16": (4, (*cp(2, "alltoall"), BF16)),
    "pp 2, Interleaved1F1B": (2, (*pipeline("Interleaved1F1B"), *LAYERS4)),
    "pp 2, ZBV": (2, (*pipeline("ZBVZeroBubble"), *LAYERS4)),
    "pp 2, DualPipeV": (2, (*pipeline("DualPipeV"), *LAYERS4)),
    "pp 2 x fsdp 2, bfloat16": (4, (*pipeline("1F1B"), *LAYERS4, BF16)),
    "pp 2 x tp 2": (
        4,
        (*pipeline("1F1B"), *LAYERS4, TP2, IN_TWOS),
    ),
    "pp 2 ZBV x fsdp 2": (4, (*pipeline("ZBVZeroBubble"), *LAYERS4)),
    "experts, bfloat16": (1, (*EXPERTS, BF16)),
    "experts, fsdp 2, ep 2": (2, (*EXPERTS, EP2)),
    "experts, fsdp 4, ep 2, bfloat16, by operator": (4, (*EXPERTS, EP2, BF16, *BY_OPERATOR)),
    "experts, fsdp 2 x tp 2, ep 4, stream copied": (4, (*EXPERTS, EP4, TP2, COPIED)),
    "deepseek_v3": (1, DEEPSEEK),
    "deepseek_v3, tp 2, balanced": (
        2,
        (*DEEPSEEK, TP2, WIDE, "--router.sequence_loss_weight=0.01"),
    ),
}


IN_CI = ("one device, recomputed", "fsdp 2", "fsdp 2 x tp 2, bfloat16", "pp 2, ZBV")
VALIDATED = (
    "one device, bfloat16",
    "fsdp 2",
    "fsdp 2 x tp 2, bfloat16",
    "fsdp 2 x cp 2, bfloat16",
    "pp 2 x fsdp 2, bfloat16",
    "pp 2, ZBV",
    "experts, fsdp 2, ep 2",
)


def resolved(job: list[str], *, world: int) -> tuple[Config, Layout]:
    config = resolve_model(load_config(job))
    return config, find_layout(config, world_size=world)


def record(job: list[str]) -> Record:
    """Record a real step of this rank."""
    config, layout = resolved(job, world=dist.get_world_size())
    mesh = build_mesh(layout.dims, device_type="cpu")
    dispatch = Tape.__torch_dispatch__

    def on_copies(tape: Tape, func: Any, *args: Any) -> Any:
        return dispatch(tape, _OnCopies(func) if func.namespace in MESSAGES else func, *args)

    def unseen(work: Callable[..., Any]) -> Callable[..., Any]:
        def worked(*args: Any, **kwargs: Any) -> Any:
            with torch._C._DisableTorchDispatch():
                return work(*args, **kwargs)

        return worked

    # gloo makes copies in waiting; neighbouring stages greet each other before the first step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__torch_dispatch__", on_copies)
        greeting = "_initialize_pipeline_distributed_state"  # before torch 2.15 `_warmup_p2p`
        if not hasattr(schedules._Schedule, greeting):
            greeting = "_warmup_p2p"
        for owner, name in ((dist.Work, "wait"), (schedules._Schedule, greeting)):
            patch.setattr(owner, name, unseen(getattr(owner, name)))
        return record_step(config, layout=layout, mesh=mesh, fakes=None)


class _OnCopies:
    """A message, sent and received in copies.

    Threads of gloo hold what they are given a moment longer than the operator takes, and what is
    sent as long as the pipeline has the handle; some operators make copies in waiting. Memory would
    seem to be freed at random. NCCL does none of it.
    """

    def __init__(self, func: Any) -> None:
        self._func = func

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._func.name()
        if "recv" in name or "wait" in name or "wrap" in name:
            return self._func(*args, **kwargs)
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        copies = {id(x): x.clone() for x in given}
        out = self._func(*tree_map_only(Tensor, lambda x: copies[id(x)], args), **kwargs)
        if self._func.namespace != "c10d":
            return tree_map_only(Tensor, lambda x: wait_tensor(x).clone(), out)
        if "send" in name:
            return out
        dist.Work.unbox(
            next(x for x in tree_leaves(out) if isinstance(x, torch.ScriptObject))
        ).wait()
        for x in given:
            x.copy_(copies[id(x)])
        originals = {id(copies[id(x)]): x for x in given}
        return tree_map_only(Tensor, lambda x: originals[id(x)], out)


def rehearsed(job: list[str], *, world: int, rank: int) -> Record:
    config, layout = resolved(job, world=world)
    return rehearse(config, layout=layout, rank=rank)


def settled(entries: Sequence[Entry]) -> list[Entry]:
    """Put what dies at once into the order of births."""
    runs = groupby(entries, key=lambda entry: entry.event == "death")
    return [
        entry
        for are_deaths, run in runs
        for entry in (sorted(run, key=lambda entry: entry.born) if are_deaths else run)
    ]


def assert_equal(real: Record, fake: Record) -> None:
    """Assert that two records are the same, and show where the first difference is."""
    pairs = enumerate(zip_longest(settled(real.entries), settled(fake.entries)))
    different = [(i, *pair) for i, pair in pairs if pair[0] != pair[1]]
    assert not different, f"{len(different)} entries differ, real and fake: {different[:3]}"
    assert real.pieces == fake.pieces


@pytest.mark.promise("plan-real")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS],
)
def test_fake_is_real(name: str, ranks: RankPool, tmp_path: Path) -> None:
    world, arguments = LAYOUTS[name]
    job = [*write_job(tmp_path, TOML), *arguments]
    reals = ranks.run(record, job, world=world)
    for rank in sorted({0, world - 1}):
        fake = rehearsed(job, world=world, rank=rank)
        assert_equal(reals[rank], fake)
        assert {entry.event for entry in fake.entries} >= {"birth", "death", "product", "pass"}
        axes = {entry.where[0] for entry in fake.entries if entry.event == "message"}
        assert "?" not in axes, "a message over a group of no axis"


@pytest.mark.promise("plan-real")
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in VALIDATED],
)
def test_fake_validation_is_real(name: str, ranks: RankPool, tmp_path: Path) -> None:
    world, arguments = LAYOUTS[name]
    larger = ("--validation.enable=true", "--validation.local_batch_size=8")
    job = [*write_job(tmp_path, TOML), *arguments, *larger]
    reals = ranks.run(record, job, world=world)
    for rank in sorted({0, world - 1}):
        assert_equal(reals[rank], rehearsed(job, world=world, rank=rank))


STAGED = ("one device, bfloat16", "fsdp 2, lora", "hsdp 2x2, bfloat16", "pp 2 x tp 2", "ddp 2")
SAVED = (
    *("--checkpoint.enable=true", "--checkpoint.async_mode=async", "--training.steps=1"),
    "--lr_scheduler.warmup_steps=0",
)


def saved(job: list[str]) -> int:
    """Run a job to its end; return the bytes of memory into which its state was copied."""
    trainer = Trainer(jobs.start(job))
    trainer.train()
    copies = trainer.run.checkpoints._staging._buffers
    trainer.close()
    of_state = [t for (name, _), t in copies.items() if name in ("model", "optimizer")]
    assert all(local_part(t).is_contiguous() for t in of_state)  # else a GPU would copy first
    return sum(local_part(t).untyped_storage().nbytes() for t in of_state)


@pytest.mark.promise("plan-real")
@pytest.mark.long
@pytest.mark.parametrize("name", STAGED)
def test_a_copy_to_save_is_as_planned(name: str, ranks: RankPool, tmp_path: Path) -> None:
    world, arguments = LAYOUTS[name]
    job = [*write_job(tmp_path, TOML), *arguments, *SAVED]
    real = ranks.run(saved, job, world=world)
    plan = plan_job(job, world_size=world, device=DEVICES["H100"], gpus_per_node=8)
    for rank in plan.first_ranks():
        assert staged(plan, rehearse_rank(plan, rank)) == real[rank] > 0


PROFILED = {
    "one device": 0,
    "one device, bfloat16": 0,
    "one device, documents": 0,
    "one device, accumulating": 0,
    "one device, recomputed": 2 * RNG_STATE,
    "experts, bfloat16": FEW,
    "deepseek_v3": FEW,
}


@pytest.mark.promise("plan-real")
@pytest.mark.long
@pytest.mark.parametrize("name", PROFILED)
def test_profiler_counts_the_same_bytes(name: str, ranks: RankPool, tmp_path: Path) -> None:
    _, arguments = LAYOUTS[name]
    [(counted, noted)] = ranks.run(profiled, [*write_job(tmp_path, TOML), *arguments], world=1)
    assert -TINY <= counted - noted <= PROFILED[name]


def profiled(job: list[str]) -> tuple[int, int]:
    """Return the peak of memory above what is there before a step, as the profiler counts what
    this process takes, and as the tape notes it.

    The profiler's is the peak behind operators: what one takes and gives back itself is no tensor.
    """
    profile = torch.profiler.profile(profile_memory=True)
    enter, leave = Tape.__enter__, Tape.__exit__

    def entered(tape: Tape) -> Any:
        profile.__enter__()
        return enter(tape)

    def left(tape: Tape, *args: Any) -> Any:
        out = leave(tape, *args)
        profile.__exit__(None, None, None)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tape, "__enter__", entered)
        patch.setattr(Tape, "__exit__", left)
        noted = record(job)
    events = profile.profiler.kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    ends = [e.end_ns() for e in events if e.name() == "PythonDispatchMode"]
    taken = [0, *accumulate(size for _, size in steps)]
    counted = max(taken[bisect_right(steps, (end, 1 << 62))] for end in ends)
    live, before = [0], 0
    for piece, end in noted.bounds():
        for entry in noted.entries[piece.start : end]:
            sign = {"birth": 1, "death": -1}.get(entry.event, 0)
            live.append(live[-1] + sign * entry.size)
            # batches, too, are there before, and noted when they are read
            before += entry.size if piece.phase == "state" and sign > 0 else 0
    batches = live[-1] - before - taken[-1]
    assert 0 <= batches < 2000
    return counted, max(live) - before - batches
