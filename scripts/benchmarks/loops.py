"""The step loops that are compared: this library's, one written by hand, and transformers' Trainer.

All of them train the same weights on the same batches with the same optimizer. `BareLoop` is what a
user would write without any trainer, 40 lines; what another loop takes longer is what it costs.
Each loop offers the same: take so many steps, and tell the losses of all steps so far.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan.parallel.execution import Batch

MAX_NORM = 1.0
# a rate at which the largest of the models here does not amplify the rounding of its first steps
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1


class Loop(Protocol):
    """Trains on from where it is."""

    def run(self, num_steps: int) -> None:
        """Take so many steps."""
        ...

    def losses(self) -> list[float]:
        """Return the mean loss of each step so far, over all ranks."""
        ...


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build AdamW as the library does: norms are not decayed, one kernel updates all."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def shard(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    dtype: torch.dtype,
    mesh: DeviceMesh | None = None,
) -> None:
    """Apply FSDP2 as its tutorial does: each block, then the rest.

    Over all ranks, if no `mesh` is given.
    """
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class BareLoop:
    """What is left of training without a trainer."""

    def __init__(
        self,
        model: nn.Module,
        logits_of: Callable[[nn.Module, Batch], Tensor],
        *,
        batches: Sequence[Batch],
        autocast: bool,
    ) -> None:
        self._model, self._logits_of, self._batches = model, logits_of, iter(batches)
        self._optimizer = build_optimizer(model)
        self._device = next(model.parameters()).device
        self._autocast = autocast
        self._losses: list[Tensor] = []

    def run(self, num_steps: int) -> None:
        """Take so many steps."""
        for _ in range(num_steps):
            batch = next(self._batches).to(self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._autocast):
                logits_BSV = self._logits_of(self._model, batch)
            loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch.labels.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        """Return the mean loss of each step so far, over all ranks."""
        return mean_over_ranks(torch.stack(self._losses))


def mean_over_ranks(losses: Tensor) -> list[float]:
    """Return the means of each step's losses, of ranks with as many tokens each."""
    if dist.get_world_size() > 1:
        losses = losses.clone()
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    values: list[float] = losses.tolist()
    return values


class _Recorded(torch.utils.data.Dataset[dict[str, Tensor]]):
    """The samples of recorded batches, one by one, for loaders that make batches themselves."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._rows = [(b.tokens[i], b.labels[i]) for b in batches for i in range(len(b.tokens))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens, labels = self._rows[i]
        return {"input_ids": tokens, "labels": labels}


class TrainerLoop:
    """transformers' Trainer, in a thread that waits whenever the others have their turn."""

    def __init__(
        self, model: nn.Module, *, batches: Sequence[Batch], autocast: bool, folder: Path
    ) -> None:
        self._steps_left = 0
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._losses: list[Tensor] = []
        train = build_trainer(
            model,
            data=_Recorded(batches),
            batch_size=len(batches[0].tokens),
            num_steps=len(batches),
            autocast=autocast,
            folder=folder,
            after_step=self._after_step,
            keep_loss=lambda loss: self._losses.append(loss.detach()),
        )

        def wait_and_train() -> None:
            self._turn.acquire()
            train()

        self._training = ThreadPoolExecutor(1).submit(wait_and_train)
        self._training.add_done_callback(lambda _: self._done.release())

    def _after_step(self) -> None:
        self._steps_left -= 1
        if self._steps_left == 0:
            self._done.release()
            self._turn.acquire()

    def run(self, num_steps: int) -> None:
        """Take so many steps."""
        self._steps_left = num_steps
        self._turn.release()
        self._done.acquire()
        if self._training.done():
            self._training.result()  # raises what has ended it

    def losses(self) -> list[float]:
        """Return the mean loss of each step so far."""
        return [float(loss) for loss in self._losses]


def build_trainer(
    model: nn.Module,
    *,
    data: _Recorded,
    batch_size: int,
    num_steps: int,
    autocast: bool,
    folder: Path,
    after_step: Callable[[], None],
    keep_loss: Callable[[Tensor], None],
) -> Callable[[], object]:
    """Return what lets transformers' Trainer train to its end, with reports every 10 steps.

    Raises:
        ImportError: transformers or accelerate is missing.
    """
    import transformers

    # it warns that a process group exists; of one rank, it makes no difference
    transformers.logging.set_verbosity_error()

    class Hooks(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            after_step()

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            logits_BSV = model(input_ids=inputs["input_ids"]).logits
            loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), inputs["labels"].flatten())
            keep_loss(loss)
            return loss

    settings = transformers.TrainingArguments(
        output_dir=str(folder / "transformers"),
        per_device_train_batch_size=batch_size,
        max_steps=num_steps,
        max_grad_norm=MAX_NORM,
        lr_scheduler_type="constant",
        learning_rate=LR,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=autocast,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
    )
    trainer = InOrder(
        model=model,
        args=settings,
        train_dataset=data,
        optimizers=(build_optimizer(model), None),
        callbacks=[Hooks()],
    )
    trainer.remove_callback(transformers.PrinterCallback)  # the table is what is printed
    return trainer.train
