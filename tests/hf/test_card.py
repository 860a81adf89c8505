"""The model card of exports, read by the Hub's own library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.finetune.chats import CHATML, SPECIAL, write_lines, write_tokenizer
from tests.models.reference import random_decoder, reference_of
from torchtitan.build import describe_export
from torchtitan.hf.describe import find_hub_id, read_license
from torchtitan.hf.export import export
from torchtitan.hf.names import CARD
from torchtitan.models.families import MODELS
from torchtitan.resume_rules import read_settings
from torchtitan.tools.convert import main as convert

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


def head_of(card: Path) -> dict:
    _, head, _ = card.read_text().split("---\n", 2)
    return yaml.safe_load(head)


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


def test_an_adapter_says_so(tuned: Path, tmp_path: Path) -> None:
    assert convert(["to-hf", str(tuned), str(tmp_path / "out"), "--lora", "adapter"]) == 0
    head = head_of(tmp_path / "out" / CARD)
    assert (head["library_name"], head["base_model"]) == ("peft", "some-org/Base-1B")
    merged = tuned / "checkpoint" / "export" / "step-2"
    for folder in (tmp_path / "out", merged):
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert ends[:2] == [SPECIAL.index("<|im_end|>"), SPECIAL.index("<|end|>")]


def test_a_card_that_is_there_is_kept(tuned: Path, tmp_path: Path) -> None:
    """Of an export that is written once more; another folder's is never taken."""
    step, out = tuned / "checkpoint" / "step-2", tmp_path / "out"
    settings = describe_export(read_settings(step), dtype=None)
    export(step, out, settings=settings, group=None)
    (out / CARD).write_text("mine")
    export(step, out, settings=settings, group=None)
    assert (out / CARD).read_text() == "mine"


def test_a_run_from_nothing_names_no_base(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=1", "--checkpoint.last_save_in_hf"]
    ranks.run(jobs.train, [*job, "--job.description=To try: it"], world=1)
    card = ModelCard.load(tmp_path / "run" / "checkpoint" / "export" / "step-1" / CARD)
    assert set(card.data.to_dict()) == {"library_name", "pipeline_tag", "tags"}
    assert "from random weights" in card.content
    assert "Add a license and a purpose before" in card.content
    assert "\nTo try: it\n" in card.content


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


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/.cache/huggingface/hub/models--a--b-c/snapshots/12", "a/b-c"),
        ("hub/models--a--b--c/snapshots/12/", "a/b--c"),
        ("models/mine", None),
        ("/home/me/a/b", None),
    ],
)
def test_the_hubs_name_is_known_in_its_cache_alone(path: str, expected: str | None) -> None:
    assert find_hub_id(Path(path)) == expected
