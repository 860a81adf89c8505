"""Jobs of a small model on one device or in stages, and what tests compare of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from torchtitan.checkpoint.state import optimizer_tensors
from torchtitan.models import deepseek_v3, llama3, qwen3_moe
from torchtitan.models.decoder import Decoder
from torchtitan.models.init import Init, Normal
from torchtitan.parallel.execution import Batch
from torchtitan.trainer import Run, Trainer

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Trained(jobs.Result):
    """What a rank tells of its part of the model."""

    gradients: dict[str, Tensor]
    """Of the first step, before clipping."""
    trained: set[str]
    """Parameters with optimizer state."""
    owns_loss: bool
    evaluated: list[float] = field(default_factory=list)
    """Summed loss of one batch after the first step, if asked for; 0 where another rank has it."""
    third_gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of step 3, if experts are balanced: the global loss has no gradient in step 1."""
    balance: dict[str, Tensor] = field(default_factory=dict)
    """State of the balance of experts."""


@contextmanager
def strong_weights() -> Iterator[None]:
    """Let attention, experts, routers and latents start far larger than they should.

    At their real size attention is so even at first, and adds so little, that a wrong position, and
    layers in the wrong order, are lost in rounding; experts would matter little, and choices nearly
    tie. Qwen3's expert biases start at 0, so that what moves them shows; DeepSeek's do not.
    """

    def stronger(correct: Callable[[Any, str], Init], *, keeps_bias: bool) -> Callable[..., Init]:
        def initial(model: Decoder, name: str) -> Init:
            if ".attention.w" in name:
                return Normal(std=0.2)
            if ".moe." in name and not (keeps_bias and name.endswith("expert_bias")):
                return Normal(std=0.3)
            return correct(model, name)

        return initial

    with pytest.MonkeyPatch.context() as patch:
        for family in (llama3.Llama3, qwen3_moe.Qwen3MoE, deepseek_v3.DeepSeekV3):
            changed = stronger(family.initial, keeps_bias=family is qwen3_moe.Qwen3MoE)
            patch.setattr(family, "initial", changed)
        yield


def train(job: list[str], *, evaluating: bool = False) -> Trained:
    """Run a job to its end on this rank, and tell more of it than `jobs.train`."""
    with strong_weights():
        run = jobs.start(job)
    initial = {name: jobs.full(p) for name, p in run.model.named_parameters()}
    gradients, third_gradients = _keep_gradients(run)
    evaluated: list[float] = []

    def evaluate(step: int) -> None:
        if evaluating and step == 1:  # what it leaves behind would show in the next steps
            evaluated.append(run.execution.evaluate(run.sequence_shard.take(_samples())).item())

    trainer = Trainer(run)
    trainer.train(on_step=evaluate)
    names = {name.rpartition(".")[0] for name in optimizer_tensors(run.model, run.optimizer)}
    assert all(p.grad is None for p in run.model.parameters())
    jobs.close(trainer)
    return Trained(
        rows=jobs.read_rows(_argument(job, "--job.dump_folder")),
        initial=initial,
        final={name: jobs.full(p) for name, p in run.model.named_parameters()},
        state_hash="",
        gradients=gradients,
        trained=names,
        owns_loss=run.execution.owns_loss,
        evaluated=evaluated,
        third_gradients=third_gradients,
        balance=run.balance.state() if run.balance is not None else {},
    )


def _keep_gradients(run: Run) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    first: dict[str, Tensor] = {}
    third: dict[str, Tensor] = {}
    plain, step = run.execution.forward_backward, 0

    def keeping(batches: Iterable[Batch], *, divisor: Tensor) -> Tensor:
        nonlocal step
        loss, step = plain(list(batches), divisor=divisor), step + 1
        if step == 1 or (step == 3 and run.balance is not None):
            for name, p in run.model.named_parameters():
                # a gradient that only some ranks have must not hang those that gather it
                grad = jobs.full(torch.zeros_like(p) if p.grad is None else p.grad)
                (first if step == 1 else third)[name] = grad
        return loss

    run.execution.forward_backward = keeping  # type: ignore[method-assign]
    return first, third


def _samples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 200, (2, 17), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "document_lengths": torch.tensor([16, 5, 11]),
    }


def _argument(job: list[str], name: str) -> str:
    return next(word.partition("=")[2] for word in reversed(job) if word.startswith(name + "="))


def whole(results: Iterable[Trained], part: Callable[[Trained], dict[str, T]]) -> dict[str, T]:
    """Put the parts of all ranks together."""
    return {name: value for result in results for name, value in part(result).items()}


def assert_same_training(results: list[Trained], reference: Trained) -> None:
    """Compare all that ranks tell with one device: to rounding, float32, relative.

    A failure names its figure first, as `loss 1` or `gradient layers.0.attention.wq.weight`.
    """
    initial = whole(results, lambda result: result.initial)
    assert initial.keys() == reference.initial.keys()
    for name, value in initial.items():
        assert torch.equal(value, reference.initial[name]), f"initial {name}"
    assert set().union(*(result.trained for result in results)) == reference.trained
    rows = results[0].rows
    assert [row["step"] for row in rows] == [row["step"] for row in reference.rows]
    for ours, theirs in zip(rows, reference.rows, strict=True):
        step = theirs["step"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), f"loss {step}"
        if step == 1:
            assert_same_gradients(results, reference, lambda result: result.gradients)
        if step == 3:
            assert_same_gradients(results, reference, lambda result: result.third_gradients)
        assert ours["max_loss"] > 0, f"max_loss {step}"
        wanted_norm = pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["grad_norm"] == wanted_norm, f"grad_norm {step}"
        for key in ("lr", "num_tokens", "valid_token_fraction"):
            assert ours[key] == theirs[key], f"{key} {step}"
        for key in (key for key in theirs if key.startswith("router/")):
            figure = theirs[key]
            close = figure if isinstance(figure, list) else pytest.approx(figure, rel=1e-4)
            assert ours[key] == close, f"{key} {step}"
    for result in results:
        assert result.balance.keys() == reference.balance.keys()
        assert all(value.equal(reference.balance[k]) for k, value in result.balance.items())
    for name, value in whole(results, lambda result: result.final).items():
        # Adam divides by the root of the second moment: an element whose gradient is a thousandth
        # of the others' is moved by the rounding of these, at most a step's length. So are all
        # elements of a key bias, whose gradients nearly cancel (softmax does not see a shift that
        # all keys share) and which starts at 0: of its movement, 1.1e-4 was rounding on one
        # processor (7e-6 in float64). Movements may differ by ten times what gradients may.
        wanted, gradient = reference.final[name], reference.gradients.get(name)
        if name.endswith("expert_bias"):  # moved by counts, which are integers
            assert value.equal(wanted), f"final {name}"
        gap, moved = value - wanted, wanted - reference.initial[name]
        if gradient is not None:
            gap = gap.where(gradient.abs() >= 1e-3 * gradient.abs().mean(), 0.0)
        assert gap.norm() <= 1e-4 * wanted.norm() + 1e-3 * moved.norm(), f"final {name}"


def assert_same_gradients(
    results: list[Trained], reference: Trained, part: Callable[[Trained], dict[str, Tensor]]
) -> None:
    """Compare each parameter's gradient with one device."""
    gradients, wanted = whole(results, part), part(reference)
    assert gradients.keys() == wanted.keys()
    for name, right in wanted.items():
        assert (gradients[name] - right).norm() <= 1e-4 * right.norm(), f"gradient {name}"


def assert_same_evaluation(results: list[Trained], reference: Trained, *, cp: int = 1) -> None:
    """Compare the loss of the batch; each of `cp` ranks has that of its part of the sequences."""
    owners = [result.evaluated[0] for result in results if result.owns_loss]
    assert sum(owners) == pytest.approx(reference.evaluated[0] * len(owners) / cp, rel=1e-5)
    if cp == 1:
        assert owners == pytest.approx(reference.evaluated * len(owners), rel=1e-5)
    assert not any(result.evaluated[0] for result in results if not result.owns_loss)


def assert_same_course(results: list[Trained], reference: Trained) -> None:
    """Compare a run that went through several starts with one in one go on one device."""
    rows = results[0].rows
    assert [row["step"] for row in rows] == [row["step"] for row in reference.rows]
    for ours, theirs in zip(rows, reference.rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["valid_token_fraction"] == theirs["valid_token_fraction"]  # the same samples
    final = whole(results, lambda result: result.final)
    assert final.keys() == reference.final.keys()
    for name, value in final.items():
        wanted = reference.final[name]
        assert (value - wanted).norm() <= 1e-4 * wanted.norm(), name
