"""The campaign's rows and helpers, and its labels with a model of the suite's own."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import finetune_campaign
from scripts.chat_rows import SHAPES, make_rows
from scripts.finetune_campaign import Campaign, Result, compare_labels, missing, to_markdown
from tests.finetune.chats import CHATML, write_tokenizer
from tests.models.reference import random_decoder, reference_of
from torchtitan.finetune.chat import Conversation, is_trained
from torchtitan.finetune.examples import parse_example
from torchtitan.models.families import MODELS


def test_rows_are_drawn_from_the_seed() -> None:
    def draw(seed: int) -> list[object]:
        return list(make_rows(SHAPES, num=225, seed=seed, render=lambda m: m[0]["content"]))

    assert draw(1) == draw(1) != draw(2)


def test_a_row_stands_for_its_conversation() -> None:
    for row in make_rows(SHAPES, num=225, seed=0, render=lambda m: m[0]["content"]):
        example = parse_example(row.value, where="here")
        if not isinstance(example, Conversation):
            assert not row.messages
            continue
        kept = [{k: m[k] for k in m if k not in ("train", "weight")} for m in example.messages]
        assert (kept, example.tools) == (row.messages, row.tools)
        assert [is_trained(m) for m in example.messages] == row.trained
        assert any(row.trained)


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


def test_what_is_wrong_is_told_from_what_is_missing() -> None:
    wrong = {
        Result("x", "loss", 2.0, 1.0): True,
        Result("x", "loss", math.nan, 1.0): True,
        Result("x", "loss", None, note="refused"): True,
        Result("x", "loss", None, note=missing("no_such_package")): False,
        Result("x", "loss", 2.0): False,
        Result("x", "loss", 1.0, 1.0): False,
    }
    assert {each: each.is_wrong for each in wrong} == wrong
    table = to_markdown({"loss": [*wrong]}).splitlines()
    assert [line.count("DIFFERS") for line in table] == [0, 0, 1, 1, 1, 0, 0, 0]
