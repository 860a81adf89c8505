"""One step of transformers' model under FSDP2, rehearsed as `torchtitan plan` rehearses ours.

The model runs on fake tensors, as one rank of a world that does not exist, and the planner's tape
records it. Around the model is what its users write: `fully_shard` on each block and on the whole,
its own loss, clipping, fused AdamW.

One answer is given for it: whether a batch has several documents in a row, which it asks the device
in each forward. A fake tensor cannot tell, and then attention would get a mask; it is told no, as
it would find for itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scripts.benchmarks.loops import MAX_NORM, build_optimizer, shard
from torchtitan.hf.config import new_config
from torchtitan.models.init import local_part
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.optim.optimizer import create_state
from torchtitan.tools.plan.rehearse import FakeTensors, fake_tensors
from torchtitan.tools.plan.tape import WORLD, Record, Tape
from torchtitan.tools.plan.world import fake_world, stand_ins

CARRIED = {"max_position_embeddings": 131_072}
"""Llama 3.1's; nothing is as long as that."""


def rehearse_theirs(
    architecture: DecoderConfig,
    *,
    spec: ModelSpec,
    world_size: int,
    batch: int,
    seq_len: int,
    recomputes: bool,
) -> Record:
    """Record a step of rank 0; `recomputes`: with transformers' gradient checkpointing.

    Raises:
        ImportError: transformers is missing.
    """
    with torch.device("meta"):
        model = build_theirs_meta(architecture, spec=spec, recomputes=recomputes)
    with fake_world(rank=0, world_size=world_size):
        mesh = init_device_mesh("cpu", (world_size,))
        shard(model, list(model.model.layers), dtype=torch.bfloat16, mesh=mesh)
        return _record(model, fakes=fake_tensors(), batch=batch, seq_len=seq_len)


def _record(model: Any, *, fakes: FakeTensors, batch: int, seq_len: int) -> Record:
    # before the mode: it would not see them as batches that come from outside
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    tokens, labels = fakes.from_tensor(tokens), fakes.from_tensor(tokens.clone())
    with fakes:
        model.to_empty(device="cpu")
        optimizer = build_optimizer(model)
        create_state(optimizer)
        tape = Tape({dist.group.WORLD.group_name: [WORLD, "fsdp"]})  # type: ignore[union-attr]
        tape.watch_blocks(_AsOurs(model))  # type: ignore[arg-type]
        _hold_state(tape, model, optimizer)
        with stand_ins(tape), _one_document(), tape:
            model(input_ids=tokens, labels=labels).loss.backward()
            tape.mark("update", None)
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        return tape.ended()


def build_theirs_meta(architecture: DecoderConfig, *, spec: ModelSpec, recomputes: bool) -> Any:
    """Build transformers' model for training, on the device that is set."""
    from transformers import AutoConfig, AutoModelForCausalLM

    said = new_config(architecture, format=spec.hf, dtype=torch.float32, carried=CARRIED)
    config = AutoConfig.for_model(**{**said, "use_cache": False})
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class _AsOurs:
    """Their model under the names by which the tape asks for blocks and for what is behind them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.layers: Mapping[str, nn.Module] = {
            str(number): block for number, block in enumerate(model.model.layers)
        }
        self.norm, self.output = model.model.norm, model.lm_head

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self._model.named_modules()

    def register_forward_hook(self, hook: Any) -> Any:
        return self._model.register_forward_hook(hook)


def _hold_state(tape: Tape, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tape.mark("state", None)
    for parameter in model.parameters():
        tape.hold(local_part(parameter.detach()), kind="weights")
        for state in optimizer.state[parameter].values():
            if isinstance(state, Tensor):
                tape.hold(local_part(state), kind="optimizer")
    tape.mark(None, None)


@contextmanager
def _one_document() -> Iterator[None]:
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices

    def found(position_ids: Tensor) -> None:
        find(position_ids)  # what it computes counts

    with patch.object(masking_utils, "find_packed_sequence_indices", found):
        yield
