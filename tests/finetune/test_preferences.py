"""Preferences: each loss against its formula in float64, references, the shapes of pairs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import MODELS, TINY, TWO_STEPS
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.finetune.chat import Conversation
from torchtitan.finetune.data import PairSource, build_examples
from torchtitan.finetune.examples import Completion, parse_pair
from torchtitan.finetune.preferences import UNIT, Answers, PreferenceLoss, find_function, orpo
from torchtitan.optim.loss import build_loss, count_valid

ANSWERS = [[5, 3, 2, 7, 4], [9, 6, 1]]
"""Labels of the answers in two samples. The last answer of the first sample has no partner, so it
is padding here."""
REFERENCES = [[-3.0, -4.5, -1.25, -9.0], [-12.0, -2.5]]
S, C, V = 30, 6, 11
Formula = Callable[..., Tensor]


def log_odds(mean: Tensor) -> Tensor:
    return mean - torch.log1p(-mean.exp())


# c, r: log-probabilities; cr, rr: those of the reference; nc, nr: numbers of labels
FORMULAS: dict[str, tuple[dict[str, float], Formula]] = {
    "dpo": (
        {"beta": 0.3, "label_smoothing": 0.2},
        lambda c, r, cr, rr, nc, nr: (
            -0.8 * F.logsigmoid(0.3 * ((c - cr) - (r - rr)))
            - 0.2 * F.logsigmoid(-0.3 * ((c - cr) - (r - rr)))
        ),
    ),
    "ipo": (
        {"beta": 0.2},
        lambda c, r, cr, rr, nc, nr: ((c - cr) / nc - (r - rr) / nr - 2.5) ** 2,
    ),
    "simpo": (
        {"beta": 2.5, "gamma": 0.5},
        lambda c, r, cr, rr, nc, nr: -F.logsigmoid(2.5 * c / nc - 2.5 * r / nr - 0.5),
    ),
    "orpo": (
        {"beta": 0.4},
        lambda c, r, cr, rr, nc, nr: (
            -c / nc - 0.4 * F.logsigmoid(log_odds(c / nc) - log_odds(r / nr))
        ),
    ),
}


def targets_of_samples() -> Tensor:
    """Each answer after a prompt of two tokens, as `PairSource` lays them out."""
    generator = torch.Generator().manual_seed(3)
    targets = torch.full((len(ANSWERS), S, 4), -100)
    targets[..., 1:3] = 0
    for row, lengths in enumerate(ANSWERS):
        start = 0
        for number, length in enumerate(lengths[: len(lengths) // 2 * 2]):
            stop = start + 2 + length
            targets[row, start:stop, 1] = number
            targets[row, start + 2 : stop, 0] = torch.randint(V, (length,), generator=generator)
            targets[row, start + 2, 2] = round(REFERENCES[row][number] / UNIT)
            if number % 2 == 0:
                targets[row, start + 2, 3] = 10 * row + number // 2
            start = stop
        targets[row, start:, 1] = len(lengths)
    return targets


def plain(name: str, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The sum over pairs from all logits, in float64, by the formula."""
    log_probs = F.log_softmax(F.linear(x, weight), -1)
    losses = []
    for row, (logs, (labels, answers, references, _)) in enumerate(
        zip(log_probs, targets.movedim(-1, 1), strict=True)
    ):
        for first in range(0, len(ANSWERS[row]) // 2 * 2, 2):
            c, r = (
                [
                    logs[t, labels[t]]
                    for t in range(S)
                    if answers[t] == first + i and labels[t] != -100
                ]
                for i in range(2)
            )
            ends = REFERENCES[row][first : first + 2]
            sums = (torch.stack(each).sum() for each in (c, r))
            losses.append(FORMULAS[name][1](*sums, *ends, len(c), len(r)))
        assert references.any()
    return torch.stack(losses).sum()


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(ANSWERS), S, C, generator=generator)
    return x, torch.randn(V, C, generator=generator), targets_of_samples()


@pytest.mark.promise("loss", "preferences")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_chunks", [1, 5])
@pytest.mark.parametrize("name", FORMULAS)
def test_each_loss_equals_its_formula(name: str, num_chunks: int, recompute: bool) -> None:
    x, weight, targets = inputs()
    log_loss = build_loss(None, num_chunks=num_chunks, recompute=recompute, per_token=True)
    device = torch.device("cpu")
    loss = PreferenceLoss(name, FORMULAS[name][0], log_loss=log_loss, group=None, device=device)
    ours = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    found = loss(*ours, targets)
    (found / 3).backward()
    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    wanted = plain(name, *exact, targets)
    (wanted / 3).backward()
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert count_valid(targets) == 3
    for mine, right in zip(ours, exact, strict=True):
        assert mine.grad is not None
        assert right.grad is not None
        assert (mine.grad - right.grad).norm() <= 2e-6 * right.grad.norm()


@pytest.mark.parametrize("certain", [0, 1])
def test_orpo_is_finite_for_a_certain_answer(certain: int) -> None:
    log_probs = torch.tensor([-3.0, -3.0], dtype=torch.float64)
    log_probs[certain] = 0.0
    log_probs.requires_grad_()
    answers = (Answers(each, torch.zeros(()), torch.ones(())) for each in log_probs)
    loss, *_ = orpo(*answers)
    loss.backward()
    assert loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dpo", {"bata": 1}),
        ("dpo", {"beta": 0}),
        ("dpo", {"beta": "1"}),
        ("dpo", {"label_smoothing": 0.5}),
        ("ipo", {"label_smoothing": 0.1}),
        ("simpo", {"gamma": float("nan")}),
    ],
)
def test_a_wrong_option_is_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        find_function(name, options)


# --- pairs

PAIRS = TrainingConfig(
    dataset="preferences",
    loss="dpo",
    attn_mask_type="block_causal",
    reset_positions=True,
    seq_len=48,
    num_epochs=1,
)


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


ASK, YES, NO = say("user", "ask"), say("assistant", "yes"), say("assistant", "no")
UNTRAINED = {**ASK, "train": False}
TEXTS = Completion("ask ", "yes", "here"), Completion("ask ", "no", "here")
CHATS = tuple(Conversation([UNTRAINED, answer], None, "here") for answer in (YES, NO))
PREFIX = "\n\nHuman: ask\n\nAssistant:"
SHAPES: list[tuple[dict[str, Any], tuple[Any, Any]]] = [
    ({"prompt": "ask ", "chosen": "yes", "rejected": "no"}, TEXTS),
    ({"prompt": [ASK], "chosen": [YES], "rejected": [NO]}, CHATS),
    ({"chosen": [ASK, YES], "rejected": [ASK, NO]}, CHATS),
    # UltraFeedback: the prompt is the first message of both
    (
        {"prompt": "ask", "chosen": [ASK, YES], "rejected": [ASK, NO], "messages": [ASK, YES]},
        CHATS,
    ),
    # Anthropic's HH-RLHF: both answers begin alike
    (
        {"chosen": f"{PREFIX} yes", "rejected": f"{PREFIX} you"},
        (Completion(PREFIX, " yes", "here"), Completion(PREFIX, " you", "here")),
    ),
    (
        {"chosen": "ask yes", "rejected": "ask no"},
        (Completion("ask", " yes", "here"), Completion("ask", " no", "here")),
    ),
]


@pytest.mark.promise("preferences")
@pytest.mark.parametrize(("row", "pair"), SHAPES)
def test_the_shapes_of_pairs(row: dict[str, Any], pair: tuple[Any, Any]) -> None:
    assert parse_pair(row, where="here") == pair


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "ask", "chosen": "yes"},
        {"prompt": "ask", "chosen": "yes", "rejected": ""},
        {"prompt": "ask", "chosen": "yes", "rejected": "yes"},
        {"prompt": "ask", "chosen": "yes", "rejected": [NO]},
        {"prompt": [ASK], "chosen": "yes", "rejected": "no"},
        {"prompt": "ask", "chosen": [YES], "rejected": [NO]},
        {"question": "ask", "chosen": "yes", "rejected": "no"},
        {"chosen": 5, "rejected": 6},
        "yes",
    ],
)
def test_no_pair(row: object) -> None:
    with pytest.raises(DataError):
        parse_pair(row, where="here")


@pytest.mark.promise("preferences")
@pytest.mark.parametrize("packing", ["padded", "packed"])
def test_samples_hold_whole_pairs_and_cut_only_prompts(packing: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": "p" * n, "chosen": "c" * (n % 7 + 1), "rejected": "r" * (n % 3 + 2)}
        for n in (1, 4, 9, 16, 25, 36, 49)
    ]
    rows.append({"prompt": "p", "chosen": "c" * 30, "rejected": "r" * 30})  # too long
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    training = replace(
        PAIRS, dataset_path=(str(file),), dataset_cache=str(tmp_path / "cache"), packing=packing
    )
    dataset = build_examples(
        training, tokenizer=build_tokenizer("byte"), tokenizer_path="byte", seed=0
    )
    [source] = dataset.sources
    assert isinstance(source, PairSource)
    source.references.copy_(torch.arange(len(source.references)))
    seen = []
    for i in range(source.num_samples):
        sample = source[i]
        labels, answers, references, pairs = sample["labels"].unbind(-1)
        numbers = pairs[pairs != -100]
        assert count_valid(sample["labels"][None]) == len(numbers)
        for place, pair in enumerate(numbers.tolist()):
            for half, letter in enumerate("cr"):
                is_here = (answers == 2 * place + half) & (labels != -100)
                text = bytes(labels[is_here][:-1].tolist()).decode()
                assert text == rows[pair][("chosen", "rejected")[half]]
                assert set(text) == {letter}
                assert references[is_here].tolist() == [2 * pair + half] + [0] * len(text)
                seen.append((pair, half))
    assert sorted(seen) == [(pair, half) for pair in range(7) for half in range(2)]
    assert (source.num_samples == 7) == (packing == "padded")
    assert np.array([len(source[i]["tokens"]) for i in range(source.num_samples)]).max() == 48


# --- references


def test_references_belong_to_their_data(tmp_path: Path) -> None:
    file, names = tmp_path / "pairs.jsonl", set[str]()
    for chosen in ("yes", "yea"):
        file.write_text(json.dumps({"prompt": "ask", "chosen": chosen, "rejected": "no"}))
        training = replace(PAIRS, dataset_path=(str(file),), dataset_cache=str(tmp_path / "cache"))
        dataset = build_examples(
            training, tokenizer=build_tokenizer("byte"), tokenizer_path="byte", seed=0
        )
        loss = PreferenceLoss("dpo", {}, log_loss=F.linear, group=None, device=torch.device("cpu"))
        names |= {*loss.find_references({"pairs": dataset})}
        with pytest.raises(ConfigError):
            loss.compute_references(step=2, evaluate=lambda _: None)
    assert len(names) == 2


def stop_and_resume(job: list[str], *, then: list[str]) -> list[list[dict[str, Any]]]:
    """Train two steps, then to four with other arguments; return the rows so far of both."""
    return [jobs.train([*job, *how]).rows for how in ([TWO_STEPS], then)]


@pytest.mark.promise("exact-resume", "preferences")
def test_a_resumed_run_keeps_the_reference_of_its_start(ranks: RankPool, tmp_path: Path) -> None:
    """In the same layout bit for bit; in another the losses are equal to rounding. A reference
    that was computed anew, of trained weights, would give log 2 again."""
    options = [*MODELS["pairs"].arguments, "--optimizer.lr=0.01", "--validation.enable"]
    whole, parts, other = (
        [*jobs.write_job(tmp_path, TINY, name=name, cache=tmp_path), *options]
        for name in ("whole", "parts", "other")
    )
    four = "--training.steps=4"
    [through] = ranks.run(jobs.train, [*whole, four], world=1)
    # float32 rounds sums of about 500 nats, in other batches, to a few 1e-6
    assert through.rows[0]["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert through.rows[-1]["loss"] < 0.68
    last = through.rows[-1]
    rewards = last["rewards/chosen"] - last["rewards/rejected"]
    assert last["rewards/margins"] == pytest.approx(rewards, rel=1e-6)
    assert last["rewards/margins"] > 0.02
    [[_, same]] = ranks.run(stop_and_resume, parts, then=[four], world=1)
    keys = ("loss", "grad_norm", "rewards/margins")
    for key in keys:
        assert [row[key] for row in same] == [row[key] for row in through.rows]
    for key in ("validation_loss", "validation_rewards/margins"):
        assert same[-1][key] == through.rows[-1][key]
    answers = ranks.run(stop_and_resume, other, then=[four], world=2)
    for key in keys:
        wanted = [row[key] for row in through.rows]
        assert [row[key] for row in answers[0][1]] == pytest.approx(wanted, rel=2e-4, abs=1e-6)


@pytest.mark.promise("balance", "preferences")
def test_losses_of_experts_are_per_label(ranks: RankPool, tmp_path: Path) -> None:
    """Routers at their start choose evenly: of each token and layer the loss is the weight."""
    options = [*MODELS["pairs, experts"].arguments, "--router.sequence_loss_weight=0.5"]
    job = [*jobs.write_job(tmp_path, TINY), *options, "--training.steps=1"]
    [result] = ranks.run(jobs.train, job, world=1)
    num_layers, tokens_per_label = 2, 1 / result.rows[0]["valid_token_fraction"]
    wanted = pytest.approx(0.5 * num_layers * tokens_per_label, rel=0.05)
    assert result.rows[0]["router/sequence_loss"] == wanted
