"""Samples of examples: each once an epoch, the loss of each as if alone, the same for everybody."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from examples.sample_log import hash_tokens
from tests.data.helpers import loader_of, rows, training
from tests.finetune.chats import CHAT, write_lines
from tests.models.reference import TINY, random_decoder
from tests.naming import naming
from torchtitan.data.dataset import Dataset
from torchtitan.data.holdout import ALL, Holdout
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.finetune.data import build_examples
from torchtitan.models.interface import Documents

EOS = 257
SEQ_LEN = 24
Row = tuple[list[int], list[bool]]


def values_of(num: int = 40) -> list[Any]:
    """Prompts and completions of many lengths, all different."""
    return [
        {"prompt": f"{i}" * (1 + i % 7), "completion": "ab"[i % 2] * (1 + i * i % 9)}
        for i in range(num)
    ]


def rows_of(values: list[Any]) -> list[Row]:
    """What each example is, worked out without the library."""
    return [
        (
            [*value["prompt"].encode(), *value["completion"].encode(), EOS],
            [False] * len(value["prompt"]) + [True] * (len(value["completion"]) + 1),
        )
        for value in values
    ]


def examples_of(
    tmp_path: Path,
    values: list[Any] | None = None,
    *,
    seed: int = 0,
    holdout: Holdout = ALL,
    **settings: Any,
) -> Dataset:
    """A byte-tokenised data set."""
    if "dataset_path" not in settings:
        lines = values_of() if values is None else values
        settings["dataset_path"] = write_lines(tmp_path / "lines" / "a.jsonl", lines)
    packs = settings.get("packing") == "packed"
    settings = {
        "dataset": "examples",
        "seq_len": SEQ_LEN,
        "attn_mask_type": "block_causal" if packs else "causal",
        **settings,
    }
    job = training(tmp_path / "cache", **settings)
    return build_examples(
        job, tokenizer=ByteTokenizer(), tokenizer_path="byte", seed=seed, holdout=holdout
    )


def documents_of(sample: dict[str, torch.Tensor]) -> list[Row]:
    """The examples in a sample, labels back in their places; padding is left out."""
    found: list[Row] = []
    lengths = sample.get("document_lengths", torch.tensor([SEQ_LEN])).tolist()
    assert sum(lengths) == SEQ_LEN
    parts = zip(sample["tokens"].split(lengths), sample["labels"].split(lengths), strict=True)
    for tokens, labels in parts:
        due = labels != -100
        if not due.any():
            assert tokens.tolist() == [EOS] * len(tokens)
            continue
        # padding of a padded sample lies behind the last label
        end = int(due.nonzero().max()) + 1
        assert torch.equal(tokens[1:end][due[: end - 1]], labels[: end - 1][due[: end - 1]])
        ids = [*tokens[:end].tolist(), int(labels[end - 1])]
        found.append((ids, [False, *due[:end].tolist()]))
    return found


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_every_example_once_an_epoch(tmp_path: Path, packing: str) -> None:
    dataset = examples_of(tmp_path, packing=packing, num_epochs=3)
    assert dataset.num_samples is not None
    expected = sorted(rows_of(values_of()))
    size = dataset.num_samples // 3
    orders = []
    for epoch in range(3):
        samples = [documents_of(dataset[k]) for k in range(epoch * size, (epoch + 1) * size)]
        orders.append(samples)
        assert sorted(row for sample in samples for row in sample) == expected
    assert orders[0] != orders[1] != orders[2]
    if packing == "padded":
        assert size == len(expected)
    else:
        places = sum(len(ids) - 1 for ids, _ in expected)
        assert size <= places / SEQ_LEN * 1.1


def test_the_order_is_a_pure_function_of_data_and_seed(tmp_path: Path) -> None:
    first = examples_of(tmp_path, packing="packed", num_epochs=1)
    orders = {
        name: [hash_tokens(dataset[k]["tokens"]) for k in range(20)]
        for name, dataset in {
            "first": first,
            "again": examples_of(tmp_path / "elsewhere", packing="packed"),
            "other": examples_of(tmp_path, packing="packed", seed=1),
        }.items()
    }
    assert orders["first"] == orders["again"] != orders["other"]
    assert examples_of(tmp_path)[10**9]["tokens"].shape == (SEQ_LEN,)


@pytest.mark.promise("data-order")
def test_any_layout_reads_the_same_samples(tmp_path: Path) -> None:
    dataset = examples_of(tmp_path, num_epochs=2)
    alone = loader_of(dataset, batch=4)
    steps = [rows(next(alone)) for _ in range(4)]
    assert [row for step in steps for row in step] == [
        rows([{key: value[None] for key, value in dataset[k].items()}])[0] for k in range(16)
    ]
    # in the middle, on two ranks with workers
    state = {"position": 8, "fingerprint": dataset.fingerprint}
    shares = []
    for rank in range(2):
        loader = loader_of(dataset, batch=2, rank=rank, degree=2, num_workers=2)
        loader.load_state_dict(state)
        shares.append(rows(next(loader)))
        loader.close()
    assert shares[0] + shares[1] == steps[2]


@pytest.mark.promise("loss", "chat-masks")
@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_the_loss_is_that_of_each_answer_alone(tmp_path: Path, packing: str) -> None:
    """Sum and all gradients, in float64: of prompts, padding and neighbours nothing comes in."""
    values = values_of(12)
    dataset = examples_of(tmp_path, values, packing=packing, num_epochs=1)
    model = random_decoder(TINY).double()
    alone = torch.zeros((), dtype=torch.float64)
    for ids, due in rows_of(values):
        logp = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
        for place in range(len(ids) - 1):
            if due[place + 1]:
                alone = alone - logp[place, ids[place + 1]]
    expected = torch.autograd.grad(alone, [*model.parameters()])
    assert dataset.num_samples is not None
    samples = [dataset[k] for k in range(dataset.num_samples)]
    tokens, labels = (torch.stack([s[key] for s in samples]) for key in ("tokens", "labels"))
    documents = positions = None
    if packing == "packed":
        lengths = torch.cat([sample["document_lengths"] for sample in samples])
        documents = Documents.from_flat(lengths, seq_len=SEQ_LEN)
        positions = documents.positions()
    logits = model(tokens, positions, documents)
    assert logits.dtype == torch.float64
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(loss, alone, rtol=1e-9, atol=1e-9)
    for got, want in zip(torch.autograd.grad(loss, [*model.parameters()]), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


LONG = [
    {"prompt": "p" * 20, "completion": "c" * 20},  # cut off
    {"prompt": "p" * 24, "completion": "c"},  # its first label is the last place
    {"prompt": "p" * 25, "completion": "c"},  # the answer lies behind the end
    {"prompt": "p", "completion": ""},  # none
    {"prompt": "p", "completion": "c" * 23},  # just fits
]


def test_long_examples_are_cut_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        dataset = examples_of(tmp_path, LONG, num_epochs=1)
    assert dataset.num_samples == 3
    texts = Counter(tuple(documents_of(dataset[k])[0][0]) for k in range(3))
    assert texts == Counter(
        {
            tuple(b"p" * 20 + b"c" * 5): 1,
            tuple(b"p" * 24 + b"c"): 1,
            (*b"p", *b"c" * 23, EOS): 1,
        }
    )
    assert naming("3 of 4 examples", "3 samples", "24 tokens").match(caplog.text)
    assert naming("3 examples", "long_examples: truncate").match(caplog.text)


def test_fingerprints_tell_what_changed(tmp_path: Path) -> None:
    def changed(values: list[Any] | None = None, **settings: Any) -> list[str]:
        now = examples_of(tmp_path / "b", values, **settings).fingerprint
        assert now.keys() == base.keys()
        return [key for key in base if now[key] != base[key]]

    base = examples_of(tmp_path / "a").fingerprint
    assert changed() == changed(num_epochs=3) == []
    assert changed(values_of(41)) == ["data"]
    assert changed(seq_len=25) == ["seq_len"]
    assert changed(seed=1) == ["seed"]
    assert changed(packing="packed") == ["packing"]
    assert changed(long_examples="skip") == ["long examples"]
    template = tmp_path / "mine.jinja"
    template.write_text("{{ eos_token }}")
    assert changed(chat_template=str(template)) == ["chat template"]


def test_another_template_makes_other_tokens(tmp_path: Path) -> None:
    """The data are what templates write: that of another is not taken from the cache."""
    settings: dict[str, Any] = {
        "dataset_path": write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}]),
        "seq_len": 200,
    }
    base = examples_of(tmp_path, **settings)
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    other = examples_of(tmp_path, chat_template=str(template), **settings)
    changed = [key for key in base.fingerprint if base.fingerprint[key] != other.fingerprint[key]]
    assert changed == ["data", "chat template"]
    text = ByteTokenizer().decode(other[0]["tokens"].tolist())
    assert text.startswith(f"user: {CHAT[0]['content']}\nassistant")
