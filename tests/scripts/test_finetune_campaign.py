"""The campaign's rows and helpers, and its labels with a model of the suite's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts import finetune_campaign
from scripts.chat_rows import SHAPES
from scripts.finetune_campaign import Campaign, compare_labels
from tests.finetune.chats import CHATML, write_tokenizer
from tests.models.reference import random_decoder, reference_of
from torchtitan.models.families import MODELS


@pytest.fixture
def campaign(tmp_path: Path) -> Campaign:
    sizes = replace(MODELS["llama3"].flavors["tiny"], vocab_size=401)
    reference_of(random_decoder(sizes)).save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model", template=CHATML)
    (tmp_path / "work").mkdir()
    return Campaign(tmp_path / "model", tmp_path / "work")


@pytest.mark.promise("chat-masks")
def test_labels_of_all_shapes(campaign: Campaign, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare_labels(campaign)
    assert [each.largest for each in found] == [0] * len(SHAPES)
    right = finetune_campaign.label_by_prefixes
    monkeypatch.setattr(
        finetune_campaign,
        "label_by_prefixes",
        lambda row, tokenizer: right(row, tokenizer)._replace(ids=[]),
    )
    assert all(each.largest == 25 and each.is_wrong for each in compare_labels(campaign))
