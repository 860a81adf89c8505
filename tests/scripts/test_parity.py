"""The rows of parity.py and helpers, and its labels with a model of the suite's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts import parity
from scripts.chat_rows import SHAPES
from scripts.parity import Bench, compare_labels
from tests.finetune.chats import CHATML, write_tokenizer
from tests.models.reference import random_decoder, reference_of
from torchtitan.models.families import MODELS


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    sizes = replace(MODELS["llama3"].flavors["tiny"], vocab_size=401)
    reference_of(random_decoder(sizes)).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", template=CHATML)
    (tmp_path / "work").mkdir()
    return Bench(tmp_path / "model", tmp_path / "work")


@pytest.mark.promise("chat-masks")
def test_labels_of_all_shapes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare_labels(bench)
    assert [each.largest for each in found] == [0] * len(SHAPES)
    right = parity.label_by_prefixes
    monkeypatch.setattr(
        parity,
        "label_by_prefixes",
        lambda row, tokenizer: right(row, tokenizer)._replace(ids=[]),
    )
    assert all(each.largest == 25 and each.is_wrong for each in compare_labels(bench))
