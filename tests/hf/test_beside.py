"""What an export holds beside the weights, and whose tokenizer a run begins with."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.sft.chats import CHATML, write_tokenizer
from torchtitan.assemble.hf import describe_export
from torchtitan.hf.beside import warn_of_other_tokenizer
from torchtitan.job import load_config


@pytest.mark.parametrize("has_own_file", [False, True])
def test_the_template_that_was_trained_on_is_what_transformers_finds(
    has_own_file: bool, tmp_path: Path
) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", template="other")
    if has_own_file:
        (folder / "chat_template.jinja").write_text("of the tokenizer")
    (tmp_path / "trained.jinja").write_text(CHATML)
    job = [f"--model.tokenizer_path={folder}"]
    examples = ["--training.dataset=synthetic_examples"]
    template = [f"--training.chat_template={tmp_path / 'trained.jinja'}"]
    own = "of the tokenizer" if has_own_file else "other"
    for options, expected in (([*examples, *template], CHATML), (examples, own), ([], own)):
        out = tmp_path / f"out{len(options)}"
        out.mkdir()
        config = load_config([*job, *options])
        for name, file in describe_export(config, dtype=None).files.items():
            shutil.copy(file, out / name)
        assert AutoTokenizer.from_pretrained(out).chat_template == expected


@pytest.mark.parametrize(("there", "expected"), [(8, 32), (32, 32), (100, 100)])
def test_the_context_is_the_longest_the_weights_have_met(
    there: int, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": there}))
    job = ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--training.seq_len=32"]
    job += ["--model.name=llama3", "--model.flavor=tiny"]
    config = load_config([*job, f"--checkpoint.initial_load_path={tmp_path}"])
    carried = describe_export(config, dtype=None).carried
    assert carried["max_position_embeddings"] == expected


def test_another_tokenizer_than_the_one_beside_the_weights_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    origin = write_tokenizer(tmp_path / "origin")
    copy = shutil.copytree(origin, tmp_path / "copy")
    other = shutil.copytree(origin, tmp_path / "other")
    (other / "tokenizer.json").write_bytes((origin / "tokenizer.json").read_bytes() + b" ")
    bare = tmp_path / "bare"
    bare.mkdir()
    same = [origin, origin / "tokenizer.json", origin / "original" / "tokenizer.model", copy]
    cases = [*((origin, path, False) for path in same), (bare, other, False)]
    cases += [(origin, other, True), (origin, Path("byte"), True)]
    for folder, path, warns in cases:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            warn_of_other_tokenizer(str(path), origin=folder)
        assert ("is not the tokenizer of this job" in caplog.text) == warns
