"""`torchtitan prepare` and `tokenizer`, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.sample_log import hash_tokens
from tests.data.helpers import dataset_of, write_texts
from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.tools import prepare as prepare_data
from torchtitan.tools import tokenizer as train_tokenizer

pytestmark = pytest.mark.usefixtures("warm_starts")

ROOT = Path(__file__).parents[2]
BYTE = ("--tokenizer", "byte")


def run(verb: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torchtitan", verb, *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_prepared_store_is_the_same_data_as_its_files(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, {"a.txt": "one " * 99, "b.jsonl": '{"body": "two"}\n' * 99})
    prefix = str(tmp_path / "new" / "store")
    done = run("prepare", prefix, *paths, "--tokenizer", "byte", "--text_key", "body")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == f"{prefix}.bin, .idx: 100 documents, {4 * 99 + 1 + 4 * 99} tokens"
    assert "0.99 bytes per token" not in second
    assert not Path(f"{prefix}.parts").exists()
    assert TokenStore(prefix).num_documents == 100
    from_files = dataset_of(tmp_path, dataset_path=paths, dataset_text_key="body")
    from_store = dataset_of(tmp_path, dataset_path=[prefix])
    assert from_store.fingerprint == from_files.fingerprint
    assert hash_tokens(from_store[7]["tokens"]) == hash_tokens(from_files[7]["tokens"])


@pytest.mark.parametrize(
    ("script", "args", "said"),
    [
        (prepare_data, ["out", "none.txt", *BYTE], "none.txt"),
        (prepare_data, ["out", "pyproject.toml", "--tokenizer", "none"], "--tokenizer"),
        (prepare_data, ["out", "pyproject.toml"], "--tokenizer"),
        (prepare_data, ["s.bin", "pyproject.toml", *BYTE], "s.bin"),
        (prepare_data, ["tests", "pyproject.toml", *BYTE], "tests"),
        (prepare_data, ["new/", "pyproject.toml", *BYTE], "new/"),
        (train_tokenizer, ["a.xls", "pyproject.toml"], "a.xls"),
        (train_tokenizer, ["new/out", "pyproject.toml"], "new/out"),
        (train_tokenizer, ["out", "pyproject.toml", "--vocab_size=9"], "--vocab_size"),
        (prepare_data, ["out", "a.jsonl", *BYTE], "a.jsonl"),
        (prepare_data, ["out", "a.jsonl", *BYTE, "--text_template", "{a"], "--text_template"),
        (prepare_data, ["out", "a.jsonl", *BYTE, "--workers", "-1"], "--workers"),
        (prepare_data, ["out", "a.jsonl", *BYTE, "--holdout_fraction=1"], "--holdout_fraction"),
        (prepare_data, ["out", "tests", *BYTE], "tests"),
        (train_tokenizer, ["out", "none.txt"], "none.txt"),
        (train_tokenizer, ["out", "a.jsonl"], "a.jsonl"),
        (train_tokenizer, ["out", "empty.txt"], "empty"),
        (train_tokenizer, ["out", "s"], "is a token store"),
    ],
)
def test_mistakes(  # type: ignore[no-untyped-def]
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, script, args: list[str], said: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "text"}\n')
    for name in ("a.xls", "pyproject.toml", "s.bin", "s.idx"):
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "tests").mkdir()
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    assert script.main(args) == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert not re.search(r"training\.|model\.", error)
    assert sorted(tmp_path.iterdir()) == before


def test_a_store_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_data.main(["~/stores/a", "~/a.txt", "--tokenizer", "byte"])
    assert TokenStore(tmp_path / "stores" / "a").num_tokens == 5


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


@pytest.mark.slow
def test_an_export_has_the_trained_tokenizer(tmp_path: Path, ranks: RankPool) -> None:
    paths = write_texts(tmp_path, {"a.txt": "low lower lowest " * 500})
    folder = tmp_path / "own"
    assert train_tokenizer.main([str(folder), *paths, "--vocab_size", "300"]) == 0
    job = [*jobs.write_job(tmp_path), "--training.steps=1", "--checkpoint.last_save_in_hf"]
    job += [f"--model.tokenizer_path={folder}", "--model.vocab_size=304"]
    ranks.run(jobs.train, job, world=1)
    export = tmp_path / "run" / "checkpoint" / "export" / "step-1"
    theirs = AutoTokenizer.from_pretrained(export)
    assert theirs.encode("low lowest") == build_tokenizer(str(folder)).encode("low lowest")
    assert json.loads((export / "config.json").read_text())["eos_token_id"] == theirs.eos_token_id
