"""The training loops that `train` compares.

All loops train the same weights on the same batches with the same optimizer. `BareLoop` is written
without any trainer; the additional time of another loop is the cost of that loop.
"""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torchtitan.checkpoint.rows import to_their_rows
from torchtitan.hf.config import new_config
from torchtitan.hf.names import CONFIG, WEIGHTS, Names
from torchtitan.models.decoder import Decoder
from torchtitan.models.spec import EACH, ModelSpec
from torchtitan.optim.clip import clip_gradients, global_norm
from torchtitan.optim.loss import count_valid
from torchtitan.optim.optimizer import optimizer_step
from torchtitan.parallel.execution import Batch
from torchtitan.trainer import Run

MAX_NORM = 1.0
# a rate at which the largest model here does not amplify the rounding of its first steps
LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.95), 1e-8, 0.1


class Loop(Protocol):
    """A training loop that can be continued."""

    def run(self, num_steps: int) -> None:
        """Take so many steps."""
        ...

    def losses(self) -> list[float]:
        """Return the mean loss over all ranks of each step so far."""
        ...


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Build fused AdamW that does not decay norms, as the library does."""
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
    """Apply FSDP2 to each block and then to the model, over `mesh` or all ranks."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class BareLoop:
    """A loop without a trainer."""

    def __init__(
        self,
        model: nn.Module,
        logits_of: Callable[[nn.Module, Tensor], Tensor],
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
                logits_BSV = self._logits_of(self._model, batch.tokens)
            loss = F.cross_entropy(logits_BSV.flatten(0, 1).float(), batch.labels.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._losses.append(loss.detach())

    def losses(self) -> list[float]:
        """Return the mean loss over all ranks of each step so far."""
        return mean_over_ranks(torch.stack(self._losses))


class JobLoop:
    """The library's own parts in a bare loop, so that two jobs can take turns in one process."""

    def __init__(self, run: Run, *, batches: Sequence[Batch]) -> None:
        self._run, self._batches = run, iter(batches)
        self._parameters = list(run.model.parameters())
        self._losses: list[Tensor] = []

    def run(self, num_steps: int) -> None:
        """Take so many steps."""
        for _ in range(num_steps):
            batch = next(self._batches).to(self._run.device)
            divisor = count_valid(batch.labels)
            loss = self._run.execution.forward_backward([batch], divisor=divisor)
            norm = global_norm(self._parameters, loss=loss)
            clip_gradients(self._parameters, norm=norm, max_norm=MAX_NORM)
            optimizer_step(self._run.optimizer, norm=norm)
            self._losses.append(loss / divisor)

    def losses(self) -> list[float]:
        """Return the mean loss of each step so far."""
        return [float(loss) for loss in self._losses]


def mean_over_ranks(losses: Tensor) -> list[float]:
    """Return the mean of each step's losses over ranks with the same number of tokens."""
    if dist.get_world_size() > 1:
        losses = losses.clone()
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
    values: list[float] = losses.tolist()
    return values


class TrainerLoop:
    """transformers' Trainer in a thread that waits while the other loops run."""

    def __init__(
        self, model: nn.Module, *, batches: Sequence[Batch], autocast: bool, folder: Path
    ) -> None:
        self._steps_left = 0
        self._turn, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._losses: list[Tensor] = []
        train = build_trainer(
            model,
            batches=batches,
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
            self._training.result()  # raises the error that ended it

    def losses(self) -> list[float]:
        """Return the mean loss of each step so far."""
        return [float(loss) for loss in self._losses]


def build_trainer(
    model: nn.Module,
    *,
    batches: Sequence[Batch],
    autocast: bool,
    folder: Path,
    after_step: Callable[[], None],
    keep_loss: Callable[[Tensor], None],
) -> Callable[[], object]:
    """Return the `train` method of a transformers' Trainer that logs every 10 steps.

    Raises:
        ImportError: transformers or accelerate is missing.
    """
    import transformers

    # without its warning that a process group exists, which has no effect with one rank
    transformers.logging.set_verbosity_error()
    samples = [(b.tokens[i], b.labels[i]) for b in batches for i in range(len(b.tokens))]
    data: Any = [{"input_ids": tokens, "labels": labels} for tokens, labels in samples]

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
        per_device_train_batch_size=len(batches[0].tokens),
        max_steps=len(batches),
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
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer.train


def build_theirs(model: Decoder, spec: ModelSpec) -> nn.Module:
    """Build transformers' model of a family with the weights of `model`, for training.

    Raises:
        ImportError: transformers is missing.
    """
    from transformers import AutoModelForCausalLM

    config = new_config(model.config, format=spec.hf, dtype=torch.float32, carried={})
    names = Names(spec.hf, model.config)
    weights: dict[str, Tensor] = {}
    for name, weight in model.state_dict().items():
        rows = to_their_rows(weight, head_dim=names.rope_head_dim(name)).contiguous()
        their_name = names.to_hf(name)
        if EACH in their_name:
            weights |= {their_name.replace(EACH, str(i)): x.clone() for i, x in enumerate(rows)}
        else:
            weights[their_name] = rows
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        save_file(weights, Path(folder) / WEIGHTS, metadata={"format": "pt"})
        theirs: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    theirs.config.use_cache = False
    trained: nn.Module = theirs.to(next(model.parameters()).device).train()
    return trained
