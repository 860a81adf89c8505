"""The model card of exports, read by the Hub's own library."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard

from scripts.convert_hf import main as convert
from scripts.convert_hf import to_hf
from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.models.reference import random_decoder, reference_of
from tests.sft.chats import CHATML, SPECIAL, write_lines, write_tokenizer
from torchtitan.assemble.generator import read_settings
from torchtitan.assemble.hf import describe_export
from torchtitan.hf.card import (
    CARD,
    base_name,
    find_hub_id,
    find_license,
    shown,
    without_folders,
)
from torchtitan.hf.write import export
from torchtitan.metrics.rows import read_rows
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
        "license_name": "x",
        "tags": ["torchtitan", "lora"],
    }
    last = read_rows(tuned / "metrics.jsonl")[-1]
    state = json.loads((tuned / "checkpoint" / "step-2" / "train_state" / "state.json").read_text())
    text = card.content
    for line in (
        "# run, step 2",
        "trained from the weights of `some-org/Base-1B`, with a LoRA adapter (rank 12, alpha 16) "
        "merged into them.",
        "| data | `mine/chats.jsonl` |",
        "| sequence length | 64 |",
        f"| tokens | {state['tokens_seen']} |",
        f"| loss at step 2 | {last['loss']:.5f} |",
        f"| validation loss at step 2 | {last['validation_loss']:.5f} |",
        "rank = 12",  # of the settings
        'dataset_path = [\n    "chats.jsonl",\n]',
        'AutoTokenizer.from_pretrained("FOLDER")',
        "\nName a purpose before you publish it.\n",
        "vllm serve FOLDER",
    ):
        assert line in text, line
    assert str(tuned.parent) not in text
    assert str(base) not in text
    assert "Theirs" not in text
    assert "~" not in text
    assert "default job" not in text
    assert "decay_type" not in text  # a default
    assert (base / CARD).read_text() == HEAD


def test_an_adapter_is_loaded_upon_its_base(tuned: Path, tmp_path: Path) -> None:
    assert convert(["to-hf", str(tuned), str(tmp_path / "out"), "--lora", "adapter"]) == 0
    text = (tmp_path / "out" / CARD).read_text()
    head = head_of(tmp_path / "out" / CARD)
    assert (head["library_name"], head["base_model"]) == ("peft", "some-org/Base-1B")
    assert "A LoRA adapter (rank 12, alpha 16) trained from the weights of" in text
    assert "--max-lora-rank 16 --lora-modules run=FOLDER" in text
    assert "PeftModel.from_pretrained" in text
    merged = tuned / "checkpoint" / "export" / "step-2"
    for folder in (tmp_path / "out", merged):
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert ends[:2] == [SPECIAL.index("<|im_end|>"), SPECIAL.index("<|end|>")]
    assert 'base.generation_config = GenerationConfig.from_pretrained("FOLDER")' in text
    assert "=FOLDER --generation-config FOLDER\n" in text
    assert "apply_chat_template" in text
    compile(text.partition("```python\n")[2].partition("```")[0], "the card", "exec")
    assert "merged" not in text.partition("<details>")[0]


def test_the_chat_that_it_shows_runs(tuned: Path, capsys) -> None:
    folder = tuned / "checkpoint" / "export" / "step-2"
    code = (folder / CARD).read_text().partition("```python\n")[2].partition("```")[0]
    exec(code.replace("FOLDER", str(folder)), said := {})
    assert said["asked"]["input_ids"].shape[1] > 10
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("outputs/base/checkpoint/export/step-2", "base, step 2"),
        ("/home/me/outputs/tiny/weights/here/step-40", "tiny, step 40"),
        ("/home/me/models/mine", "mine"),
        ("/home/me/hub/models--a--b-c/snapshots/step-3", "a/b-c"),
    ],
)
def test_a_base_that_is_a_step_is_named_by_its_run(path: str, expected: str) -> None:
    assert base_name(Path(path), checkpoint_folder="weights/here") == expected


def test_figures_that_are_not_there_are_left_out(tuned: Path, tmp_path: Path) -> None:
    """A step that was copied has its own state alone, whatever lies two folders above it."""
    shutil.copytree(tuned / "checkpoint" / "step-2", tmp_path / "else" / "step-2")
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "loss": 7.0}\n')
    to_hf(tmp_path / "else" / "step-2", tmp_path / "out")
    text = (tmp_path / "out" / CARD).read_text()
    assert "| tokens |" in text
    assert "loss at step" not in text


def test_figures_are_those_of_the_step(tuned: Path, tmp_path: Path) -> None:
    run = shutil.copytree(tuned, tmp_path / "run")
    more = [{"step": 1, "loss": 1.5}, {"step": 2, "loss": 2.5}, {"step": 3, "loss": 3.5}]
    with (run / "metrics.jsonl").open("a") as file:  # step 2 once more, and one after it
        file.writelines(json.dumps(row) + "\n" for row in more)
    to_hf(run, tmp_path / "out")
    assert "| loss at step 2 | 2.50000 |" in (tmp_path / "out" / CARD).read_text()


def test_a_damaged_record_is_an_error(tuned: Path, tmp_path: Path, capsys) -> None:
    run = shutil.copytree(tuned, tmp_path / "run")
    (run / "metrics.jsonl").write_text("nothing\n{}\n")
    assert convert(["to-hf", str(run), str(tmp_path / "out")]) == 2
    assert "metrics.jsonl must be a JSON object" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


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
    assert "A model trained by a run that names no weights to begin from." in card.content
    assert "No license is known: name a license and a purpose before" in card.content
    assert "apply_chat_template" not in card.content
    assert "\nTo try: it\n" in card.content
    assert "The folder has no tokenizer: that of the training, `byte`, is not in" in card.content
    assert "AutoTokenizer" not in card.content


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (HEAD, {"license": "llama3.2", "license_name": "x"}),
        ("---\nlicense: other\nlicense_link: https://a.b/c\n---\n", {"license": "other"}),
        ("---\ntags: []\n---\nlicense: mit\n", {}),
        ("license: mit\n", {}),
        ("---\nlicense: mit\n", {}),
        ("---\nlicense:\n- mit\n---\n", {}),
        ("---\nlicense: [mit]\n---\n", {}),
        ("---\nlicense: a b\n---\n", {}),
        ("", {}),
        (None, {}),
    ],
)
def test_a_license_is_read_or_not_known(card: str | None, expected: dict, tmp_path: Path) -> None:
    if card is not None:
        (tmp_path / CARD).write_text(card)
    found = find_license(tmp_path)
    assert {**found, **expected} == found
    assert set(found) - set(expected) <= {"license_link"}


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


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("outputs/base/step-2", "outputs/base/step-2"),
        ("chats/*.jsonl", "chats/*.jsonl"),
        ("/home/me/chats.jsonl", "chats.jsonl"),
        ("~/models/mine/", "mine"),
        ("/home/me/chats/*.jsonl", "chats/*.jsonl"),
        ("bpe_2048", "bpe_2048"),
        ("/data/chats/**/*", "chats/**/*"),
        ("/home/me/*", "~/*"),
    ],
)
def test_no_home_is_told(path: str, expected: str) -> None:
    assert shown(path) == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/data/one/train.jsonl", "one/train.jsonl"),
        ("/data/one/*", "one/*"),
        ("/home/me/chats.jsonl", "~/chats.jsonl"),
        ("~/chats/mine.jsonl", "chats/mine.jsonl"),
        ("/x.jsonl", "x.jsonl"),
        ("outputs/chats/a.jsonl", "outputs/chats/a.jsonl"),
    ],
)
def test_data_are_named_with_their_folder(path: str, expected: str) -> None:
    assert shown(path, num_names=2) == expected


def test_absolute_paths_lose_their_folders() -> None:
    assert without_folders('a = ["/a/b/*"]') == 'a = ["b/*"]'
    assert without_folders('a = ["web=/home/me/x.txt", "b"]') == 'a = ["web=x.txt", "b"]'
    assert without_folders('a = "https://a.b/c"') == 'a = "https://a.b/c"'
    toml = 'a = "/home/me/x.txt"\nb = ["~/y/z", "../k/l", "/m/"]\n"/p/q \\" r/s" = 1\nc = "s/t"\n'
    short = 'a = "x.txt"\nb = ["z", "../k/l", "/m/"]\n"s" = 1\nc = "s/t"\n'
    assert without_folders(toml) == short
