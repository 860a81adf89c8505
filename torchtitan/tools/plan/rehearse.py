"""Rehearse one optimizer step of one rank: the trainer's own code, on fake tensors.

The model, FSDP, recomputation and the pipeline run as they are, in a world with simulated other
ranks (`world.py`), and a tape records them. A rehearsal may skip blocks that are like their
neighbours; `copies.py` adds them to the record. It may repeat microbatches (`microbatches.py`).

Tensors are on a fake CPU, because a fake GPU needs a driver. If a GPU would take another path that
matters, it is selected explicitly: bfloat16 for "auto", fused kernels as set.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensors

from torchtitan.build import balance_experts, build_model
from torchtitan.data.loader import Samples
from torchtitan.data.settings import TrainingConfig
from torchtitan.job import Config
from torchtitan.mesh.dims import Mesh, build_mesh
from torchtitan.models.init import local_part
from torchtitan.models.interface import LanguageModel, ModelParts
from torchtitan.optim.clip import clip_gradients, global_norm
from torchtitan.optim.loss import count_valid
from torchtitan.optim.optimizer import build_optimizer, create_state, optimizer_step
from torchtitan.parallel.context.shard import build_shard
from torchtitan.parallel.execution import Batch
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.parallelize import allocate
from torchtitan.parallel.pipeline.schedules import Action
from torchtitan.tools.plan.copies import CannotCopyError, Template, copy_blocks
from torchtitan.tools.plan.microbatches import repeat_microbatches
from torchtitan.tools.plan.tape import Pool, Record, Tape
from torchtitan.tools.plan.world import axes_by_group, fake_world, load_evenly, stand_ins
from torchtitan.validate import evaluate, validation_source

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")


def fake_tensors() -> FakeTensors:
    """Return a mode whose tensors have shapes but no contents. They may meet real tensors."""
    return FakeTensors(allow_non_fake_inputs=True)


def rehearse(
    config: Config,
    *,
    layout: Layout,
    rank: int,
    skipped: Collection[int] = (),
    repeats: bool = False,
    validates: bool = False,
) -> Record:
    """Record a step of `rank`, or its validation, without the blocks in `skipped`.

    The record starts with the weights and the optimizer's state. Raises CannotCopyError if
    microbatches should be repeated (`repeats`) and are not alike.
    """
    with fake_world(rank=rank, world_size=layout.dims.world_size):
        mesh = build_mesh(layout.dims, device_type="cpu")
        return record_step(
            config,
            layout=_without(layout, skipped),
            mesh=mesh,
            fakes=fake_tensors(),
            repeats=repeats,
            validates=validates,
        )


def record_step(
    config: Config,
    *,
    layout: Layout,
    mesh: Mesh,
    fakes: FakeTensors | None,
    repeats: bool = False,
    validates: bool = False,
) -> Record:
    """Record a step of this rank of the job. The process group must exist.

    `fakes` creates fake tensors; None: a real step on this machine's CPU. `repeats` runs a few
    microbatches of a pipeline's step and repeats their record; `validates` runs batches of the
    validation instead.
    """
    tape, fake = Tape(axes_by_group(mesh)), fakes or nullcontext()

    def fill(part: LanguageModel) -> None:
        with fake:
            allocate(part, device=CPU, offloads=False)

    model, execution = build_model(config, layout=layout, mesh=mesh, device=CPU, fill=fill)
    for part in model:
        tape.watch_blocks(part)
        load_evenly(part, dtype=getattr(torch, config.training.mixed_precision_param))
    num = None if validates else layout.accumulation
    batches = _batches(config, num=num, mesh=mesh, fakes=fakes)
    with fake:
        dtype = getattr(torch, config.training.mixed_precision_param)
        optimizer = build_optimizer(model, settings=config.optimizer, dtype=dtype)
        create_state(optimizer)
        balance = balance_experts(config, layout=layout, model=model, mesh=mesh, device=CPU)
        offloads = config.training.enable_cpu_offload
        _hold_state(tape, model, optimizer, pool="host" if offloads else "compute")
        if validates:
            with stand_ins(tape, are_fake=fakes is not None), tape:
                evaluate(batches, model=model, execution=execution, device=CPU)
            return tape.ended()
        parameters = [p for p in model.parameters() if p.requires_grad]
        with stand_ins(tape, are_fake=fakes is not None), tape:
            divisor = (
                torch.stack([count_valid(batch.labels) for batch in batches]).sum().clamp(min=1)
            )
            if balance is not None:
                balance.begin(divisor)
            with repeat_microbatches(tape, _row(layout)) if repeats else nullcontext():
                loss_sum = execution.forward_backward(batches, divisor=divisor)
            tape.mark("update", None)
            pool: Pool | None = "host" if offloads else None
            for p in parameters:
                if p.grad is not None:
                    tape.name(local_part(p.grad), kind="gradients", pool=pool)
            norm = global_norm(parameters, loss=loss_sum)
            clip_gradients(parameters, norm=norm, max_norm=config.training.max_norm)
            optimizer_step(optimizer, norm=norm)
            if balance is not None:
                balance.update(norm=norm)
            execution.after_update()
        return tape.ended()


def _row(layout: Layout) -> Sequence[Action]:
    """Return this rank's actions in the table of the pipeline."""
    assert layout.pipeline is not None
    return layout.pipeline.table[dist.get_rank() // (layout.dims.world_size // layout.dims.pp)]


def _without(layout: Layout, skipped: Collection[int]) -> Layout:
    """Return the layout of the model without the skipped blocks."""
    if not skipped:
        return layout
    gone = {f"layers.{number}" for number in skipped}

    def adapt(model: LanguageModel) -> None:
        if layout.adapt is not None:
            layout.adapt(model)
        for number in skipped:
            del model.layers[str(number)]

    pipeline = layout.pipeline
    if pipeline is not None:
        modules = tuple(tuple(m for m in stage if m not in gone) for stage in pipeline.modules)
        pipeline = replace(pipeline, modules=modules)
    return replace(layout, adapt=adapt, pipeline=pipeline)


def _batches(
    config: Config, *, num: int | None, mesh: Mesh, fakes: FakeTensors | None
) -> list[Batch]:
    """Return `num` equal batches of this rank, or the validation's if it is None."""
    source = config.training
    if num is None:  # two batches: the second finds weights that the first left gathered
        source, num = validation_source(source, config.validation), 2
    shard = build_shard(config.parallelism, training=config.training, mesh=mesh)
    samples = _samples(source)
    return [_as_fake(shard.take(samples), fakes) for _ in range(num)]


def _samples(source: TrainingConfig) -> Samples:
    """Return the samples of a batch, each one document."""
    tokens = torch.zeros(source.local_batch_size, source.seq_len, dtype=torch.int64)
    lengths = torch.full((source.local_batch_size,), source.seq_len)
    return {"tokens": tokens, "labels": tokens.clone(), "document_lengths": lengths}


def _as_fake(batch: Batch, fakes: FakeTensors | None) -> Batch:
    if fakes is None:
        return batch
    names = ("tokens", "labels", "positions")
    return replace(batch, **{name: fakes.from_tensor(getattr(batch, name)) for name in names})


def _hold_state(
    tape: Tape, model: ModelParts, optimizer: torch.optim.Optimizer, *, pool: Pool
) -> None:
    """Record weights and the optimizer's state before the step, block by block."""
    for name, parameter in model.named_parameters():
        words = name.split(".")
        tape.mark("state", int(words[1]) if words[0] == "layers" else None)
        state = [t for t in optimizer.state.get(parameter, {}).values() if isinstance(t, Tensor)]
        tape.hold(local_part(parameter.detach()), kind="weights", pool=pool)
        for tensor in state:
            tape.hold(local_part(tensor.detach()), kind="optimizer", pool=pool)
    tape.mark(None, None)


def rehearse_step(config: Config, *, layout: Layout, rank: int, validates: bool = False) -> Record:
    """Do the same as `rehearse`, but copy most blocks and microbatches if possible.

    Accumulation steps, and microbatches that do not change the peak, are skipped by `shorten`.
    """
    rehearsed = partial(rehearse, config, layout=layout, rank=rank, validates=validates)

    def run(skipped: Collection[int] = ()) -> Record:
        if layout.pipeline is None or validates:
            return rehearsed(skipped=skipped)
        try:
            return rehearsed(skipped=skipped, repeats=True)
        except CannotCopyError as error:
            logger.info("all microbatches are rehearsed: %s", error)
            return rehearsed(skipped=skipped)

    templates, skipped = find_templates(config, layout=layout, rank=rank)
    if templates:
        try:
            return copy_blocks(run(skipped=skipped), templates)
        except CannotCopyError as error:
            logger.info("all blocks are rehearsed: %s", error)
    return run()


def find_templates(config: Config, *, layout: Layout, rank: int) -> tuple[list[Template], set[int]]:
    """Return the templates of each stage of a rank, and all blocks that are skipped."""
    table = [] if layout.pipeline is None else layout.pipeline.table
    if any(action.kind == "backward_weight" for row in table for action in row):
        return [], set()  # weight gradients are not computed block by block
    period = _period(config)
    kinds = _kinds(layout)
    templates, skipped = [], set()
    for stage in _stages(layout, rank=rank):
        # the equal blocks at the end of the stage
        start = next(
            (i for i in reversed(range(1, len(stage))) if kinds[stage[i]] != kinds[stage[i - 1]]), 0
        )
        first = start + MARGIN
        first += -(stage[first] if first < len(stage) else 0) % period
        spare = len(stage) - first - period - MARGIN - period
        times = spare // period
        if times < 1:
            continue
        gone = stage[first + period : first + period * (1 + times)]
        skipped |= set(gone)
        kept = [block for block in stage if block not in skipped]
        templates.append(Template(blocks=tuple(kept), first=first, period=period, times=times))
    return templates, skipped


MARGIN = 2
"""Number of blocks before and after a template that may differ from it."""


def _period(config: Config) -> int:
    recomputation = config.activation_checkpoint
    option = recomputation.selective_ac_option
    return int(option) if recomputation.mode == "selective" and option.isdecimal() else 1


def _kinds(layout: Layout) -> list[object]:
    """Return a comparable description of each block of the model."""
    model = layout.spec.build_meta(layout.architecture)
    if layout.adapt is not None:
        layout.adapt(model)
    layout.trained.freeze_rest(model)
    wide = layout.float8.filter_fqns if layout.float8 is not None else ()
    return [
        [
            (name, p.shape, p.requires_grad, [part in f"layers.{number}.{name}" for part in wide])
            for name, p in block.named_parameters()
        ]
        for number, block in model.layers.items()
    ]


def _stages(layout: Layout, *, rank: int) -> list[list[int]]:
    """Return the blocks of each stage of a rank."""
    if layout.pipeline is None:
        return [list(range(layout.architecture.num_layers))]
    own = layout.pipeline.stages_of(rank // (layout.dims.world_size // layout.dims.pp))
    return [
        [int(name.split(".")[1]) for name in layout.pipeline.modules[stage] if "." in name]
        for stage in own
    ]
