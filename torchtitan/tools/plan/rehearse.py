"""Rehearse one optimizer step of one rank: the trainer's own code, on fake tensors.

The model, FSDP, recomputation and the pipeline run as they are, in a world with simulated other
ranks (`world.py`), and a tape records them.

Tensors are on a fake CPU, because a fake GPU needs a driver. If a GPU would take another path that
matters, it is selected explicitly: bfloat16 for "auto", fused kernels as set.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensors

from torchtitan.build import balance_experts, build_head_loss, build_model
from torchtitan.data.loader import Samples
from torchtitan.data.settings import OF_PAIRS, TrainingConfig
from torchtitan.job import Config
from torchtitan.mesh.dims import Mesh, build_mesh
from torchtitan.models.init import local_part
from torchtitan.models.interface import LanguageModel, ModelParts
from torchtitan.optim.clip import clip_gradients, global_norm
from torchtitan.optim.loss import count_valid
from torchtitan.optim.optimizer import build_optimizer, create_state, optimizer_step
from torchtitan.parallel.context.shard import SequenceShard, build_shard
from torchtitan.parallel.execution import Batch
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.parallelize import allocate
from torchtitan.tools.plan.tape import Pool, Record, Tape
from torchtitan.tools.plan.world import axes_by_group, fake_world, load_evenly, stand_ins
from torchtitan.validate import evaluate, validation_source

CPU = torch.device("cpu")


def rehearse(config: Config, *, layout: Layout, rank: int, title: str = "") -> Record:
    """Record a step of `rank`, and its validation if the job has one.

    The record starts with the weights and the optimizer's state. A `title` is shown on stderr.
    """
    if title:
        sys.stderr.write(f"rehearsing {title}\n")
    with fake_world(rank=rank, world_size=layout.dims.world_size):
        mesh = build_mesh(layout.dims, device_type="cpu")
        fakes = FakeTensors(allow_non_fake_inputs=True)
        return record_step(config, layout=layout, mesh=mesh, fakes=fakes)


def record_step(
    config: Config,
    *,
    layout: Layout,
    mesh: Mesh,
    fakes: FakeTensors | None,
) -> Record:
    """Record a step of this rank of the job, and its validation. The process group must exist.

    Args:
        config: Settings of the job.
        layout: Its layout.
        mesh: Process groups.
        fakes: Creates fake tensors. None: a real step on this machine's CPU.
    """
    tape, fake = Tape(axes_by_group(mesh)), fakes or nullcontext()

    def fill(part: LanguageModel) -> None:
        with fake:
            allocate(part, device=CPU, offloads=False)

    loss = build_head_loss(config, layout=layout, mesh=mesh, device=CPU)
    model, execution = build_model(
        config, layout=layout, mesh=mesh, device=CPU, loss=loss, fill=fill
    )
    dtype = getattr(torch, config.training.mixed_precision_param)
    for part in model:
        tape.watch_blocks(part)
        load_evenly(part, dtype=dtype)
    shard = build_shard(config.parallelism, training=config.training, mesh=mesh)
    batches = _batches(config.training, shard, fakes, num=layout.accumulation)
    source = validation_source(config.training, config.validation)
    # the second batch finds weights that the first one has left gathered
    validated = _batches(source, shard, fakes, num=2 * config.validation.enable)
    offloads = config.training.enable_cpu_offload
    with fake:
        optimizer = build_optimizer(model, settings=config.optimizer, dtype=dtype)
        create_state(optimizer)
        balance = balance_experts(config, layout=layout, model=model, mesh=mesh, device=CPU)
        _hold_state(tape, model, optimizer, pool="host" if offloads else "compute")
        parameters = [p for p in model.parameters() if p.requires_grad]
        with stand_ins(tape, are_fake=fakes is not None), tape:
            divisor = (
                torch.stack([count_valid(batch.labels) for batch in batches]).sum().clamp(min=1)
            )
            if balance is not None:
                balance.begin(divisor)
            loss_sum = execution.forward_backward(batches, divisor=divisor)
            tape.mark("update", None)
            pool: Pool | None = "host" if offloads else None
            for p in parameters:
                if p.grad is not None:
                    tape.name(local_part(p.grad), purpose="gradients", pool=pool)
            norm = global_norm(parameters, loss=loss_sum)
            clip_gradients(parameters, norm=norm, max_norm=config.training.max_norm)
            optimizer_step(optimizer, norm=norm)
            if balance is not None:
                balance.update(norm=norm)
            execution.after_update()
            if validated:
                tape.is_validating = True
                tape.mark(None, None)
                evaluate(validated, model=model, execution=execution, device=CPU)
        return tape.copy_record()


def _batches(
    source: TrainingConfig, shard: SequenceShard, fakes: FakeTensors | None, *, num: int
) -> list[Batch]:
    """Return `num` equal batches of this rank, whose samples are one document each."""
    tokens = torch.zeros(source.local_batch_size, source.seq_len, dtype=torch.int64)
    lengths = torch.full((source.local_batch_size,), source.seq_len)
    labels = tokens.clone()
    if source.loss in OF_PAIRS:  # one answer in each sample, which is the first of a pair
        labels = torch.zeros(*tokens.shape, 4, dtype=torch.int64)
    samples: Samples = {"tokens": tokens, "labels": labels, "document_lengths": lengths}
    batches = [shard.take(samples) for _ in range(num)]
    if fakes is None:
        return batches
    names = ("tokens", "labels", "positions")
    return [
        replace(batch, **{name: fakes.from_tensor(getattr(batch, name)) for name in names})
        for batch in batches
    ]


def _hold_state(
    tape: Tape, model: ModelParts, optimizer: torch.optim.Optimizer, *, pool: Pool
) -> None:
    """Record weights and the optimizer's state before the step, block by block."""
    for name, parameter in model.named_parameters():
        words = name.split(".")
        tape.mark("state", int(words[1]) if words[0] == "layers" else None)
        state = [t for t in optimizer.state.get(parameter, {}).values() if isinstance(t, Tensor)]
        tape.hold(local_part(parameter.detach()), purpose="weights", pool=pool)
        for tensor in state:
            tape.hold(local_part(tensor.detach()), purpose="optimizer", pool=pool)
    tape.mark(None, None)
