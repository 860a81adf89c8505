"""Validation is the same figure in every layout, and leaves no trace in the training."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.data.test_split import is_held_out
from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_resume import exact
from tests.jobs import TINY, TINY8, UNSAVED, pipeline
from torchtitan.checkpoint.storage import find_steps
from torchtitan.data.dataset import PadToBatch
from torchtitan.job import load_config
from torchtitan.mesh.stop import StopRequest
from torchtitan.models.families import MODELS
from torchtitan.models.interface import Documents, HeadLoss
from torchtitan.trainer import Trainer
from torchtitan.validate import BATCHES_BETWEEN_VOTES

pytestmark = pytest.mark.slow

NUM_SAMPLES, SEQ_LEN = 13, 32
TP2 = "--parallelism.tensor_parallel_degree=2"
CP2 = "--parallelism.context_parallel_degree=2"
# name: ranks, arguments
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    # ten samples at once: of the last 3 of the 13, one rank has all and one has none
    "fsdp 2, ragged": (2, ("--validation.local_batch_size=5",)),
    "cp 2": (2, (CP2, "--training.local_batch_size=8")),
    "tp 2": (2, (TP2, "--training.local_batch_size=8")),
    "pp 2 1F1B x fsdp 2": (4, (*pipeline("1F1B"), "--validation.local_batch_size=3")),
}


def write_held_out(folder: Path) -> Path:
    """Documents of many lengths that make 13 samples, and a rest too short for one more."""
    num_tokens = NUM_SAMPLES * SEQ_LEN + 7
    words = "".join(f"{i * i} " for i in range(200))
    path = folder / "held_out.jsonl"
    texts, begin = [], 0
    for i in range(1000):
        length = min(3 + 7 * i % 50, num_tokens - begin - len(texts) - 1)
        if length < 1:
            break
        texts.append(words[begin : begin + length])
        begin += length
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def validated(folder: Path, toml: str = TINY8, **names: Any) -> list[str]:
    """The arguments of a job that validates after steps 1, 2 and 3."""
    return [
        *jobs.write_job(folder, toml, **names),
        "--training.steps=3",
        "--training.attn_mask_type=block_causal",
        "--validation.enable",
        "--validation.dataset=files",
        f"--validation.dataset_path={write_held_out(folder)}",
        "--validation.freq=2",
    ]


def by_hand(job: list[str], weights: dict[str, Tensor]) -> float:
    """The loss in float64, a sample at a time."""
    run = jobs.start(job)
    model = MODELS["llama3"].build(replace(MODELS["llama3"].flavors["tiny8"], num_layers=4))
    assert run.validator is not None
    batches = run.validator.loader.dataset
    assert isinstance(batches, PadToBatch)
    assert batches.num_drawn == NUM_SAMPLES
    model.load_state_dict(weights)
    model.double()
    loss, num_labels = 0.0, 0
    for k in range(NUM_SAMPLES):
        sample = batches[k]
        documents = Documents.from_flat(sample["document_lengths"], seq_len=SEQ_LEN)
        logits = model(sample["tokens"][None], None, documents)[0]
        loss += F.cross_entropy(logits, sample["labels"], reduction="sum").item()
        num_labels += int((sample["labels"] != -100).sum())
    return loss / num_labels


@dataclass(frozen=True)
class Reference:
    losses: list[float]
    final: float


@pytest.fixture(scope="module")
def reference(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Reference:
    """One device, and what its last weights make of the data in float64."""
    job = validated(tmp_path_factory.mktemp("one"), cache=cache)
    [result] = ranks.run(jobs.train, job, world=1)
    other = [*job, "--checkpoint.enable=false", "--checkpoint.folder=none"]
    [final] = ranks.run(by_hand, other, result.final, world=1)
    return Reference([row["validation_loss"] for row in result.rows], final)


@pytest.mark.promise("validation")
def test_the_loss_is_that_of_each_sample_once(reference: Reference) -> None:
    assert len(set(reference.losses)) == 3
    assert reference.losses[-1] == pytest.approx(reference.final, rel=1e-6)


@pytest.mark.promise("validation")
@pytest.mark.slow(gate=["pp 2 1F1B x fsdp 2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_figure_in_any_layout(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, reference: Reference
) -> None:
    world, arguments = LAYOUTS[layout]
    job = [*validated(tmp_path, cache=cache), *arguments, "--metrics.save_for_all_ranks"]
    ranks.run(jobs.train, [*job, UNSAVED, "--training.steps=2"], world=world)
    for name in ("metrics.jsonl", *(f"metrics.rank_{rank}.jsonl" for rank in range(1, world))):
        lines = (tmp_path / "run" / name).read_text().splitlines()
        losses = [json.loads(line)["validation_loss"] for line in lines]
        assert losses == pytest.approx(reference.losses[:2], rel=1e-6)


NO_TRACE: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process, compiled, recomputed, worker": (
        1,
        (
            "--validation.dataloader.num_workers=1",
            "--compile.enable",
            "--compile.backend=aot_eager",
            "--activation_checkpoint.mode=full",
            "--training.local_batch_size=8",
            "--validation.local_batch_size=5",
        ),
    ),
    "fsdp 2, saved in between": (2, ("--checkpoint.interval=1", "--training.gc_freq=1")),
    "pp 2 ZBV": (2, ("--model.flavor=tiny8", "--model.num_layers=4", *pipeline("ZBVZeroBubble"))),
}


def draw_too(correct: HeadLoss) -> HeadLoss:
    """A loss that draws from torch's generator, as dropout does."""

    def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return correct(x, weight, labels) * (1 + 0.01 * torch.rand(()).item())

    return loss


def train_noisily(job: list[str]) -> tuple[jobs.Result, list[bool]]:
    """Train with such a loss; tell of each part of the model whether it is left as one to train."""
    with jobs.other_loss(draw_too):
        run = jobs.start(job)
    trainer = Trainer(run)
    trainer.train()
    jobs.close(trainer)
    # before anything gathers them: what a checkpoint would hold
    sharded = [isinstance(p, torch.distributed.tensor.DTensor) for p in run.model.parameters()]
    folder = load_config(job).job.dump_folder
    final = {name: jobs.full(p) for name, p in run.model.named_parameters()}
    result = jobs.Result(jobs.read_rows(folder), {}, final, jobs.hash_state(run))
    return result, [*sharded, *(part.training for part in run.model)]


@pytest.mark.promise("validation")
@pytest.mark.parametrize("case", NO_TRACE)
def test_nothing_of_the_training_differs(
    case: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    """Bit for bit: weights, optimizer, random generator, position, logged figures."""
    world, arguments = NO_TRACE[case]
    with_it = [*validated(tmp_path, TINY, name="with", cache=cache), *arguments]
    without = [*validated(tmp_path, TINY, name="without", cache=cache), *arguments]
    results = ranks.run(train_noisily, with_it, world=world)
    plain = ranks.run(train_noisily, [*without, "--validation.enable=false"], world=world)
    for (ours, kept), (theirs, expected) in zip(results, plain, strict=True):
        assert exact(ours.rows) == exact(theirs.rows)
        assert ours.state_hash == theirs.state_hash
        assert kept == expected
        assert all("validation_loss" in row for row in ours.rows)
        assert not any("validation_loss" in row for row in theirs.rows)


def train_to(job: list[str], losses: dict[int, float]) -> list[int]:
    """Train with validations that give these losses; return the steps after which they were."""
    run = jobs.start(job)
    assert run.validator is not None

    def measure(step: int, **_: Any) -> dict[str, float]:
        return {"validation_loss": losses.get(step, 9.0)}

    run.validator.measure = measure  # type: ignore[method-assign]
    trainer = Trainer(run)
    trainer.train()
    jobs.close(trainer)
    rows = jobs.read_rows(load_config(job).job.dump_folder)
    return [row["step"] for row in rows if "validation_loss" in row]


@pytest.mark.promise("validation")
def test_the_best_checkpoints_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    losses = {2: 3.0, 3: 0.5, 4: 1.0, 6: 2.0, 8: 2.5, 10: 4.0}
    job = [
        *validated(tmp_path, TINY),
        "--validation.freq=1000",
        "--checkpoint.interval=2",
        "--checkpoint.keep_latest_k=1",
        "--checkpoint.keep_best=2",
        "--checkpoint.async_mode=async",
        "--training.local_batch_size=8",
    ]
    for steps, kept in ((4, [2, 4]), (8, [4, 6, 8]), (10, [4, 6, 10])):
        [validations] = ranks.run(train_to, [*job, f"--training.steps={steps}"], losses, world=1)
        folder = tmp_path / "run" / "checkpoint"
        assert sorted(int(path.name[5:]) for path in folder.glob("step-*")) == kept
    # each save, and the first step; not step 3, which is not saved
    assert validations == [1, 2, 4, 6, 8, 10]


def stop_while_validating(job: list[str]) -> tuple[int, int, str | None]:
    """Ask one rank to stop in the third batch of the validation after step 2."""
    run, stop, counted = jobs.start(job), StopRequest(), 0
    stop.defer()
    evaluate = run.execution.evaluate

    def counting(batch: Any) -> Any:
        nonlocal counted
        if run.progress.step == 2:
            counted += 1
            if counted == 3 and dist.get_rank() == 0:
                stop.on_signal(signal.SIGTERM)
        return evaluate(batch)

    run.execution.evaluate = counting  # type: ignore[method-assign]
    trainer = Trainer(run, stop=stop)
    reason = trainer.train()
    trainer.close()
    return counted, run.progress.step, reason


@pytest.mark.parametrize("world", [1, 2])
def test_a_signal_is_obeyed_between_batches(ranks: RankPool, tmp_path: Path, world: int) -> None:
    job = [*validated(tmp_path, TINY8), "--validation.freq=1", "--training.steps=5"]
    job += ["--validation.local_batch_size=1", f"--parallelism.tensor_parallel_degree={world}"]
    for counted, step, reason in ranks.run(stop_while_validating, job, world=world):
        assert (counted, step) == (BATCHES_BETWEEN_VOTES, 2)
        assert reason is not None
    rows = jobs.read_rows(tmp_path / "run")
    assert [row["step"] for row in rows if "validation_loss" in row] == [1]
    assert find_steps(tmp_path / "run" / "checkpoint") == [2]


def split_job(folder: Path, name: str, cache: Path, *arguments: str) -> list[str]:
    """A job that holds a third of its documents out, and validates on them every two steps."""
    path = write_held_out(folder)
    return [
        *jobs.write_job(folder, name=name, cache=cache),
        "--training.dataset=files",
        f"--training.dataset_path={path}",
        "--training.attn_mask_type=block_causal",
        "--training.seq_len=16",
        "--training.global_batch_size=4",
        "--training.local_batch_size=4",
        "--training.steps=5",
        "--validation.enable",
        "--validation.holdout_fraction=0.3",
        "--validation.freq=2",
        *arguments,
    ]


@pytest.mark.promise("validation")
def test_held_out_documents_are_as_if_in_files_of_their_own(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    """All figures, those of the training too; and resumed, on more ranks and with it off: after
    the same steps."""
    texts = [json.loads(line)["text"] for line in write_held_out(tmp_path).open()]
    for name, held_out in (("kept", False), ("held", True)):
        lines = [json.dumps({"text": t}) for t in texts if is_held_out(t) == held_out]
        assert len(lines) > 3
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    [ours] = ranks.run(jobs.train, split_job(tmp_path, "split", cache), world=1)
    by_files = split_job(
        tmp_path,
        "files",
        cache,
        f"--training.dataset_path={tmp_path / 'kept.jsonl'}",
        "--validation.holdout_fraction=none",
        f"--validation.dataset_path={tmp_path / 'held.jsonl'}",
    )
    [theirs] = ranks.run(jobs.train, by_files, world=1)
    losses = validation_losses(ours)
    assert exact(ours.rows) == exact(theirs.rows)
    assert losses == validation_losses(theirs)
    assert [*losses] == [1, 2, 4, 5]
    first = split_job(tmp_path, "resumed", cache, "--training.steps=2", "--validation.enable=false")
    ranks.run(jobs.train, first, world=1)
    shutil.copytree(tmp_path / "resumed", tmp_path / "on 2")
    for world, name in ((1, "resumed"), (2, "on 2")):
        job = split_job(tmp_path, name, cache, f"--training.local_batch_size={4 // world}")
        [result, *_] = ranks.run(jobs.train, job, world=world)
        later = {step: loss for step, loss in losses.items() if step > 2}
        if world == 1:
            assert exact(result.rows) == exact(ours.rows)
            assert result.state_hash == ours.state_hash
            assert validation_losses(result) == later
        else:
            assert [row["loss"] for row in result.rows] == pytest.approx(
                [row["loss"] for row in ours.rows], rel=1e-5
            )
            assert validation_losses(result) == pytest.approx(later, rel=1e-5)


def validation_losses(result: jobs.Result) -> dict[int, float]:
    """The losses by step."""
    return {r["step"]: r["validation_loss"] for r in result.rows if "validation_loss" in r}
