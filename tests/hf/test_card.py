"""The model card of exports, read by the Hub's own library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.finetune.chats import CHATML, write_lines, write_tokenizer
from tests.models.reference import random_decoder, reference_of
from torchtitan.hf.describe import read_license
from torchtitan.hf.names import CARD
from torchtitan.models.families import MODELS

HEAD = "---\nlicense: llama3.2\nlicense_name: 'x'\nlanguage: [en]\n---\n# Theirs\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as the cache of downloads holds it, with its card."""
    folder = tmp_path_factory.mktemp("hub") / "models--some-org--Base-1B" / "snapshots" / "abc"
    model = random_decoder(replace(MODELS["llama3"].flavors["tiny"], vocab_size=420))
    reference_of(model).save_pretrained(write_tokenizer(folder, template=CHATML))
    (folder / CARD).write_text(HEAD)
    return folder


@pytest.fixture(scope="module")
def tuned(base: Path, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that trains an adapter on chats, validates, and exports the merged model."""
    folder = tmp_path_factory.mktemp("tuned")
    chat = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
    file = write_lines(folder / "mine" / "chats.jsonl", [{"messages": chat}] * 40)
    toml = """
[training]
dataset = "examples"
seq_len = 64
local_batch_size = 2
steps = 2
[lora]
rank = 12
[validation]
enable = true
dataset = "synthetic_examples"
steps = 1
[checkpoint]
enable = true
initial_load_in_hf = true
last_save_in_hf = true
[metrics]
log_freq = 1
"""
    options = [f"--training.dataset_path={file}", f"--checkpoint.initial_load_path={base}"]
    ranks.run(jobs.train, [*jobs.write_job(folder, toml), *options], world=1)
    return folder / "run"


def test_it_says_what_the_run_was(tuned: Path, base: Path) -> None:
    folder = tuned / "checkpoint" / "export" / "step-2"
    card = ModelCard.load(folder / CARD)
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "some-org/Base-1B",
        "license": "llama3.2",
        "tags": ["torchtitan"],
    }
    state = json.loads((tuned / "checkpoint" / "step-2" / "train_state" / "state.json").read_text())
    text = card.content
    assert f"Trained from some-org/Base-1B on {state['tokens_seen']:,} tokens" in text
    assert str(tuned.parent) not in text
    assert str(base) not in text
    assert "Theirs" not in text
    assert "default job" not in text
    assert (base / CARD).read_text() == HEAD


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (HEAD, "llama3.2"),
        ("license: mit\n", None),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\nlicense: a b\n---\n", None),
        (None, None),
    ],
)
def test_a_license_is_read_or_not_known(
    card: str | None, expected: str | None, tmp_path: Path
) -> None:
    if card is not None:
        (tmp_path / CARD).write_text(card)
    assert read_license(tmp_path) == expected
