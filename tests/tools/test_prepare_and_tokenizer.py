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
from tests.naming import naming
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.tools import prepare as prepare_data
from torchtitan.tools import tokenizer as train_tokenizer

pytestmark = pytest.mark.usefixtures("warm_starts")

ROOT = Path(__file__).parents[2]


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
        (prepare_data, ["out", "none.txt", "--tokenizer", "byte"], "error: files: no file matches"),
        (
            prepare_data,
            ["out", "pyproject.toml", "--tokenizer", "none"],
            "error: --tokenizer: must",
        ),
        (prepare_data, ["out", "pyproject.toml"], "required: --tokenizer"),
        (prepare_data, ["s.bin", "pyproject.toml", "--tokenizer", "byte"], "without .bin and"),
        (prepare_data, ["tests", "pyproject.toml", "--tokenizer", "byte"], "no folder, got 'tests"),
        (prepare_data, ["new/", "pyproject.toml", "--tokenizer", "byte"], "no folder, got 'new/'"),
        (train_tokenizer, ["a.xls", "pyproject.toml"], "output must be a folder"),
        (train_tokenizer, ["new/out", "pyproject.toml"], "got new/out"),
        (
            prepare_data,
            ["out", "a.jsonl", "--tokenizer", "byte"],
            "under the key",
        ),
        (
            prepare_data,
            ["out", "a.jsonl", "--tokenizer", "byte", "--text_template", "{a"],
            "--text_template: ",
        ),
        (prepare_data, ["out", "a.jsonl", "--tokenizer", "byte", "--workers", "-1"], "0 or more"),
        (prepare_data, ["out", "tests", "--tokenizer", "byte"], "error: files: no file matches"),
        (train_tokenizer, ["out", "none.txt"], "error: files: no file matches"),
        (train_tokenizer, ["out", "a.jsonl"], "under the key"),
        (train_tokenizer, ["out", "empty.txt"], "must not be empty"),
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
    try:
        code = script.main(args)
    except SystemExit as end:  # argparse
        code = end.code
    assert code == 2
    error = capsys.readouterr().err
    assert re.search(said, error), error
    assert not re.search(r"training\.|model\.", error)
    assert sorted(tmp_path.iterdir()) == before


def test_a_store_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_data.main(["~/stores/a", "~/a.txt", "--tokenizer", "byte"])
    assert TokenStore(tmp_path / "stores" / "a").num_tokens == 5


@pytest.mark.parametrize("verb", ["prepare", "tokenizer"])
def test_help(verb: str) -> None:
    done = run(verb, "--help")
    assert done.returncode == 0
    assert f"torchtitan {verb}" in done.stdout


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


def test_training_on_files_merges_the_most_frequent_pairs(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, {"a.txt": "low lower lowest " * 50, "b.txt": "newest widest"})
    folder = tmp_path / "new"
    done = run("tokenizer", str(folder), *paths, "--vocab_size", "262")
    assert (done.returncode, done.stdout) == (0, f"{folder}: 262 ids, the last two BOS and EOS\n")
    # the most frequent pairs, by hand: lo or ow come 150 times, then low, then " low" 149 times
    tokenizer = build_tokenizer(str(folder))
    merged = [tokenizer.decode([i]) for i in range(256, 260)]
    assert merged[1] == "low"
    assert set(merged) == {merged[0], "low", " low", merged[3]}
    assert merged[0] in {"lo", "ow"}


def test_vocabularies_below_the_bytes_are_refused(tmp_path: Path) -> None:
    done = run("tokenizer", str(tmp_path / "t"), "--vocab_size", "257")
    assert done.returncode == 2
    assert naming(258, 257).match(done.stderr)
