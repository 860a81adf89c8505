"""Known bugs of trainers, each put in the place of the right code of a rank: `compare --plant`.

A bug is a function that replaces a piece of the trainer in this process, for good. Its docstring
says what goes wrong, and where trainers had it. Nothing of the trainer knows of this file:
`layouts/rank.py` calls it in the ranks that are launched for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from torchtitan import trainer
from torchtitan.assemble import run as assembly
from torchtitan.checkpoint import restore
from torchtitan.data.loader import Loader
from torchtitan.models.init import local_part
from torchtitan.optim import balance, clip
from torchtitan.optim.loss import IGNORE_INDEX, count_valid
from torchtitan.parallel import apply, execution, tensor
from torchtitan.parallel.batch import Batch
from torchtitan.parallel.context.layout import SequenceShard
from torchtitan.parallel.pipeline.execution import Pipeline
from torchtitan.parallel.pipeline.tied import TiedEmbedding


def _put(owner: Any, name: str, planted: Any) -> None:
    setattr(owner, name, planted)


def mean_of_means() -> None:
    """Divide the loss of each microbatch by its own valid tokens, as if all had equally many: the
    gradient accumulation bug found in most trainers in 2024."""
    correct_step, correct_sum = trainer.Trainer._train_step, trainer.Agreement.sum_valid
    correct_build, of_step = assembly.build_loss, {"fraction": 1.0, "tokens": 1}

    def step(self: Any, microbatches: Any) -> Any:
        of_step["tokens"] = self.run.tokens_per_step
        return correct_step(self, microbatches)

    def sum_valid(self: Any, num_valid: Tensor) -> Tensor:
        total = correct_sum(self, num_valid)
        of_step["fraction"] = total.item() / of_step["tokens"]
        return total

    def build(*args: Any, **kwargs: Any) -> Any:
        right = correct_build(*args, **kwargs)

        def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            expected = of_step["fraction"] * labels.numel()
            return right(x, weight, labels) * (expected / count_valid(labels).clamp(min=1))

        return loss

    _put(trainer.Trainer, "_train_step", step)
    _put(trainer.Agreement, "sum_valid", sum_valid)
    _put(assembly, "build_loss", build)


def microbatch_dropped() -> None:
    """Leave the last microbatch of each step out of forward and backward, and in the divisor: an
    off-by-one in an accumulation loop."""
    for owner in (execution.WholeModel, Pipeline):
        correct: Any = owner.forward_backward

        def dropping(
            self: Any, batches: Sequence[Batch], *, divisor: Tensor, correct: Any = correct
        ) -> Tensor:
            loss_sum: Tensor = correct(self, batches[:-1], divisor=divisor)
            return loss_sum

        _put(owner, "forward_backward", dropping)


def gradients_averaged_over_dp() -> None:
    """Average gradients over the ranks of FSDP, its default, after the loss was divided by the
    global batch already."""
    correct = apply.apply_fsdp

    def averaging(model: nn.Module, *, mesh: Any, **arguments: Any) -> None:
        correct(model, mesh=mesh, **arguments)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(mesh.size()))

    _put(apply, "apply_fsdp", averaging)


def copies_not_reduced() -> None:
    """Never sum gradients over copies of the model (DDP, HSDP): a `no_sync` that is left on."""
    correct = execution.sync_gradients
    _put(execution, "sync_gradients", lambda model, last: correct(model, last=False))


def norms_not_summed_over_tp() -> None:
    """Keep each tensor-parallel rank's own gradient of a norm under sequence parallelism: the
    all-reduce that Megatron-LM marks parameters for, forgotten."""
    correct = tensor._Norm
    _put(tensor, "_Norm", lambda stream: correct(Replicate()))


def weight_permuted_in_tp_shard() -> None:
    """Put the rows of one tensor-parallel shard of one matrix in another order: a conversion that
    lays out heads wrongly."""
    correct = assembly.materialize

    def permuted(part: Any, **kwargs: Any) -> None:
        correct(part, **kwargs)
        for name, parameter in part.named_parameters():
            if not (name.startswith("layers.") and isinstance(parameter, DTensor)):
                continue
            names = parameter.device_mesh.mesh_dim_names or ()
            if "tp" in names and parameter.placements[names.index("tp")].is_shard():
                if parameter.device_mesh.get_local_rank("tp") == 1:
                    local = local_part(parameter.detach())
                    local.copy_(local.flip(0))
                return

    _put(assembly, "materialize", permuted)


def _change_batches(change: Callable[[Batch, int], Batch]) -> None:
    """Change what every rank takes of a microbatch; `change` is told its rank along cp."""
    correct = SequenceShard.take

    def take(self: SequenceShard, samples: Mapping[str, Tensor]) -> Batch:
        return change(correct(self, samples), self._rank)

    _put(SequenceShard, "take", take)


def labels_shifted_in_cp_shard() -> None:
    """Shift tokens to labels after the sequence was cut: the last label of each rank's part is its
    first one."""

    def change(batch: Batch, rank: int) -> Batch:
        labels = batch.labels.clone()
        labels[:, -1] = batch.tokens[:, 0]
        return replace(batch, labels=labels)

    _change_batches(change)


def gradients_not_summed_over_cp() -> None:
    """Leave what the tokens of all but the first context-parallel rank add out of the gradients,
    but not out of the loss."""
    correct_build, seen = assembly.build_loss, {"rank": 0}

    def note(batch: Batch, rank: int) -> Batch:
        seen["rank"] = rank
        return batch

    def build(*args: Any, **kwargs: Any) -> Any:
        right = correct_build(*args, **kwargs)

        def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            value = right(x, weight, labels)
            return value if seen["rank"] == 0 else value.detach() + 0 * value

        return loss

    _change_batches(note)
    _put(assembly, "build_loss", build)


def mask_ignored() -> None:
    """Learn tokens whose labels are masked too: a prompt mask lost in a collator."""

    def change(batch: Batch, rank: int) -> Batch:
        is_masked = batch.labels == IGNORE_INDEX
        return replace(batch, labels=torch.where(is_masked, batch.tokens, batch.labels))

    _change_batches(change)


def tied_copy_stale() -> None:
    """Never bring the last stage's copy of a tied embedding up to date."""
    _put(TiedEmbedding, "refresh_copy", lambda self: None)


def tied_gradient_not_summed() -> None:
    """Forget the last stage's gradient of a tied embedding: the all-reduce between first and last
    stage that pipelines of shared weights need."""

    def forget(self: TiedEmbedding) -> None:
        if self._copy is not None:
            self._copy.grad = None

    _put(TiedEmbedding, "add_gradient", forget)


def lr_late() -> None:
    """Step with the learning rate of the step before: a scheduler that is advanced after the
    optimizer by one too few."""
    correct, held = trainer.set_lr, list[float]()

    def late(optimizer: torch.optim.Optimizer, lr: float) -> None:
        correct(optimizer, held[-1] if held else lr)
        held.append(lr)

    _put(trainer, "set_lr", late)


def norm_of_own_shard() -> None:
    """Clip by the norm of this rank's own gradients, not of all: torch's `clip_grad_norm_` on
    local shards."""
    _put(clip, "dist", SimpleNamespace(all_reduce=lambda total: None))


def router_bias_not_synced() -> None:
    """Move the biases of experts by what this rank's own tokens chose."""
    correct, right = balance.Balance.update, balance.dist

    def update(self: balance.Balance, *, norm: Tensor) -> None:
        _put(balance, "dist", SimpleNamespace(all_reduce=lambda counts: None))
        correct(self, norm=norm)
        _put(balance, "dist", right)

    _put(balance.Balance, "update", update)


def optimizer_not_restored() -> None:
    """Resume with a fresh optimizer."""
    correct = restore.storage.read_tensors

    def read(path: Any, component: str, **kwargs: Any) -> None:
        if component != "optimizer":
            correct(path, component, **kwargs)

    _put(restore, "storage", SimpleNamespace(**{**vars(restore.storage), "read_tensors": read}))


def position_off_by_one() -> None:
    """Resume one sample too far on in the data."""
    correct = Loader.load_state_dict

    def load(self: Loader, state: dict[str, Any]) -> None:
        correct(self, {**state, "position": state["position"] + 1})

    _put(Loader, "load_state_dict", load)


def rng_not_restored() -> None:
    """Resume with random generators as they are at a start."""
    _put(restore, "set_rng", lambda states: None)
