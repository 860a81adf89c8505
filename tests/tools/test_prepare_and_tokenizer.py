"""`torchtitan prepare` and `tokenizer`, run as a user runs them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.sample_log import hash_tokens
from tests.data.helpers import dataset_of, write_texts
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.tools import prepare as prepare_data
from torchtitan.tools import tokenizer as train_tokenizer

pytestmark = pytest.mark.usefixtures("warm_starts")

ROOT = Path(__file__).parents[2]
BYTE = ("--tokenizer", "byte")


@pytest.mark.slow
def test_a_prepared_store_is_the_same_data_as_its_files(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, {"a.txt": "one " * 99, "b.jsonl": '{"body": "two"}\n' * 99})
    prefix = str(tmp_path / "new" / "store")
    command = [sys.executable, "-m", "torchtitan", "prepare", prefix, *paths, *BYTE]
    subprocess.run([*command, "--text_key", "body"], cwd=ROOT, check=True)
    store = TokenStore(prefix)
    assert (store.num_documents, store.num_tokens) == (100, 4 * 99 + 1 + 4 * 99)
    assert not Path(f"{prefix}.parts").exists()
    from_files = dataset_of(tmp_path, dataset_path=paths, dataset_text_key="body")
    from_store = dataset_of(tmp_path, dataset_path=[prefix])
    assert from_store.fingerprint == from_files.fingerprint
    assert hash_tokens(from_store[7]["tokens"]) == hash_tokens(from_files[7]["tokens"])


@pytest.mark.parametrize(
    ("script", "args", "said"),
    [
        (prepare_data, ["out", "none.txt", *BYTE], "none.txt"),
        (prepare_data, ["s.bin", "pyproject.toml", *BYTE], "s.bin"),
        (prepare_data, ["new/", "pyproject.toml", *BYTE], "new/"),
        (train_tokenizer, ["a.xls", "pyproject.toml"], "a.xls"),
        (train_tokenizer, ["out", "pyproject.toml", "--vocab_size=9"], "--vocab_size"),
        (prepare_data, ["out", "a.jsonl", *BYTE], "a.jsonl"),
        (prepare_data, ["out", "a.jsonl", *BYTE, "--text_template", "{a"], "--text_template"),
        (prepare_data, ["out", "a.jsonl", *BYTE, "--holdout_fraction=1"], "--holdout_fraction"),
        (train_tokenizer, ["out", "empty.txt"], "empty"),
        (train_tokenizer, ["out", "s"], "is a token store"),
    ],
)
def test_mistakes(tmp_path, capsys, monkeypatch, script, args, said):
    (tmp_path / "a.jsonl").write_text('{"body": "text"}\n')
    for name in ("a.xls", "pyproject.toml", "s.bin", "s.idx"):
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert script.main(args) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert not re.search(r"training\.|model\.", error)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.promise("tokenizers")
def test_a_trained_tokenizer_is_that_of_the_library(tmp_path: Path) -> None:
    """And transformers reads its folder."""
    odd = "naïve 中文 \U0001f600 don't  DON'T\r\n\r\n 123456 \t x\n" * 5
    source = (ROOT / "torchtitan" / "data" / "settings.py").read_text()
    (tmp_path / "a.txt").write_text(source + odd)
    folder = tmp_path / "new"
    code = train_tokenizer.main([str(folder), str(tmp_path / "a.txt"), "--vocab_size", "700"])
    assert code == 0
    ours, theirs = build_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    assert (ours.vocab_size, ours.eos_id, theirs.eos_token_id, len(theirs)) == (700, 699, 699, 700)
    assert (theirs.bos_token_id, theirs.decode([698])) == (698, "<|begin_of_text|>")
    for text in (source, odd, "".join(map(chr, range(1, 0xD800)))):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids) == text
