"""Samples of examples: each once an epoch, the loss of each as if alone, the same for everybody."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.sample_log import hash_tokens
from tests.data.helpers import loader_of, rows, training
from tests.finetune.chats import CHAT, CHATML, write_lines, write_tokenizer
from tests.models.reference import TINY, random_decoder
from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data.dataset import Dataset
from torchtitan.data.holdout import ALL, Holdout
from torchtitan.data.store import open_writer
from torchtitan.data.tokenizer import ByteTokenizer, build_tokenizer
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


def test_a_sample_is_the_same_wherever_it_is_asked_for(tmp_path: Path) -> None:
    dataset = examples_of(tmp_path, packing="packed")
    message = pickle.dumps(dataset)
    assert len(message) < 2000
    copy = pickle.loads(message)
    for k in (7, 3, 100, 7):
        sample, again = dataset[k], copy[k]
        assert all(torch.equal(sample[key], again[key]) for key in sample)
        # whoever writes into a sample spoils nobody else's
        for tensor in (*sample.values(), *again.values()):
            tensor.fill_(-7)


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


def test_long_examples_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        dataset = examples_of(tmp_path, LONG, num_epochs=1, long_examples="skip")
    assert dataset.num_samples == 1
    assert naming("1 of 4 examples", "1 sample").match(caplog.text)
    assert naming("3 examples", "long_examples: skip").match(caplog.text)


def test_a_store_is_no_file_of_examples(tmp_path: Path) -> None:
    with open_writer(tmp_path / "s", vocab_size=9) as writer:
        writer.add(np.arange(9), ends_document=True)
    with pytest.raises(DataError, match=naming(".jsonl", tmp_path / "s.idx")):
        examples_of(tmp_path, dataset_path=str(tmp_path / "s"))


def test_no_example_is_left(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=naming("a.jsonl", 1)):
        examples_of(tmp_path, [{"prompt": "a", "completion": ""}])
    with pytest.raises(DataError, match=naming("seq_len", 24, 1)):
        examples_of(tmp_path, [{"prompt": "a" * 99, "completion": "b"}])
    with pytest.raises(DataError, match=naming("dataset_path", "nowhere/*.jsonl")):
        examples_of(tmp_path, dataset_path="nowhere/*.jsonl")
    # what failed left nothing that a later start would take for whole
    assert not list((tmp_path / "cache").glob("*.tmp"))


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


def test_tokenised_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = examples_of(tmp_path)
    monkeypatch.setattr(ByteTokenizer, "encode", None)
    again = examples_of(tmp_path, dataset_path=str(tmp_path / "lines" / "a.jsonl"))
    assert [hash_tokens(first[k]["tokens"]) for k in range(9)] == [
        hash_tokens(again[k]["tokens"]) for k in range(9)
    ]


def test_chats_by_a_hugging_face_tokenizer(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", template=CHATML)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    job = training(tmp_path / "cache", dataset="examples", dataset_path=path, seq_len=200)
    tokenizer = build_tokenizer(str(folder))
    dataset = build_examples(job, tokenizer=tokenizer, tokenizer_path=str(folder), seed=0)
    labels = dataset[0]["labels"]
    learnt = tokenizer.decode(labels[labels != -100].tolist())
    assert learnt == "".join(message["content"] + "<|im_end|>" for message in CHAT[1::2])
    assert dataset[0]["tokens"][-1] == tokenizer.special_tokens["<|end|>"]


@pytest.mark.parametrize("packing", ["packed", "padded"])
def test_built_in_examples(tmp_path: Path, packing: str) -> None:
    job = training(tmp_path, dataset="synthetic_examples", packing=packing, seq_len=128)
    tokenizer = build_tokenizer("bpe_2048")
    dataset = build_examples(job, tokenizer=tokenizer, tokenizer_path="bpe_2048", seed=0)
    texts = [tokenizer.decode(dataset[k]["tokens"].tolist()) for k in range(50)]
    assert any("What follows" in text for text in texts)
    assert any("What follows" not in text for text in texts) or packing == "packed"


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


def test_other_settings_have_samples_of_their_own(tmp_path: Path) -> None:
    """The tokens are those of the cache, what is planned with them is not."""

    def num_samples(**settings: Any) -> int | None:
        return examples_of(tmp_path, LONG * 3, num_epochs=1, **settings).num_samples

    assert num_samples() == 9
    assert num_samples(long_examples="skip") == 3
    assert num_samples(seq_len=64) == 12
    # 40 and 24 places fill one, 26 and 25 share another
    assert num_samples(seq_len=64, packing="packed") == 6
    packs = [examples_of(tmp_path, packing="packed", seed=seed) for seed in (0, 1)]
    shared = [{tuple(dataset[k]["tokens"].tolist()) for k in range(20)} for dataset in packs]
    assert shared[0] != shared[1]


def test_written_special_tokens_need_a_setting(tmp_path: Path) -> None:
    end = "<|end_of_text|>"
    values = [
        {"prompt": f"a{end}", "completion": "b"},
        {"messages": [CHAT[0], {"role": "assistant", "content": f"a{end}b"}]},
    ]
    path = write_lines(tmp_path / "a.jsonl", values)
    with pytest.raises(DataError) as raised:
        examples_of(tmp_path, dataset_path=[path])
    assert all(f"{path} line {i}:" in str(raised.value) for i in (1, 2))
    meant = {"special_tokens_in_examples": "encode", "seq_len": 400, "num_epochs": 1}
    assert examples_of(tmp_path, dataset_path=[path], **meant).num_samples == 2


def test_keys_that_nothing_reads_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = {"role": "assistant", "content": "b", "weight": 1, "train": True, "empty": None}
    chat = [CHAT[0], {**answer, "mood": "good", "reasoning": "c"}, CHAT[2], {**answer, "mood": 1}]
    row = {"messages": chat, "chat_template_kwargs": {"style": "short"}}
    template = tmp_path / "a.jinja"
    template.write_text(
        CHATML.replace("message.content", "(message['reasoning_content'] or '') + message.content")
    )
    for setting, expected in (
        (None, ["mood", "reasoning_content", "style"]),
        (str(template), ["mood", "style"]),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            examples_of(tmp_path, [row] * 3, seq_len=200, chat_template=setting)
        unread = [message for message in caplog.messages if "nothing reads" in message]
        assert [
            key for key in expected if any(repr(key) in message for message in unread)
        ] == expected
        assert len(unread) == len(expected)
        assert all(naming("3 examples").match(message) for message in unread)


WHOLE = {
    "each as JSON": "{{ message | tojson }}",
    "its items": "{% for k, v in message.items() %}{{ k }}: {{ v }}, {% endfor %}",
    "only the user's": "{{ message | tojson if message.role == 'user' else message.content }}",
}


@pytest.mark.parametrize("name", WHOLE)
def test_keys_of_messages_that_are_written_whole_are_read(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ends = "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}"
    template = tmp_path / "a.jinja"
    template.write_text(f"{{% for message in messages %}}{WHOLE[name]}{ends}{{% endfor %}}")
    chat = [{**CHAT[0], "mood": "good"}, {**CHAT[1], "name": "b"}]
    with caplog.at_level(logging.WARNING):
        examples_of(tmp_path, [{"messages": chat}] * 3, seq_len=400, chat_template=str(template))
    assert "'mood'" not in caplog.text
    assert ("'name'" in caplog.text) == (name == "only the user's")


def test_null_arguments_and_a_missing_end_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = tmp_path / "a.jinja"
    template.write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls is defined }}"
        "{% endgeneration %}<|end_of_text|>{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    chat = [CHAT[0], {**CHAT[1], "tool_calls": [call]}]
    with caplog.at_level(logging.WARNING):
        examples_of(tmp_path, [{"messages": chat}] * 2, seq_len=400, chat_template=str(template))
    assert [naming("2 examples", "null").match(m) is not None for m in caplog.messages].count(True)
    assert [
        naming("2 examples", "endgeneration").match(m) is not None for m in caplog.messages
    ].count(True)


@pytest.mark.parametrize(
    "template",
    [  # Vicuna's and GLM's way: nothing after an answer, or the next speaker's marker
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ],
)
@pytest.mark.parametrize("num_messages", [2, 4])
def test_answers_that_nothing_ends_are_warned_of(
    template: str, num_messages: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if "add_generation_prompt" not in template:
        template += "{% if add_generation_prompt %}assistant: {% endif %}"
    (tmp_path / "a.jinja").write_text(template)
    rows = [{"messages": CHAT[:num_messages]}] * 3
    with caplog.at_level(logging.WARNING):
        examples_of(tmp_path, rows, seq_len=400, chat_template=str(tmp_path / "a.jinja"))
    assert any(naming("3 examples", "learn to stop").match(m) for m in caplog.messages)
    assert "endgeneration" not in caplog.text
