"""`torchtitan prepare` and `tokenizer`, run as a user runs them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.sample_log import hash_tokens
from tests.data.helpers import dataset_of, write_texts
from tests.naming import naming
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import build_tokenizer, read_ranks
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
        (train_tokenizer, ["tests", "pyproject.toml"], "output must be a file"),
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
    assert f"python -m torchtitan {verb}" in done.stdout


@pytest.mark.promise("tokenizers")
def test_a_trained_tokenizer_is_that_of_the_library(tmp_path: Path) -> None:
    source = (ROOT / "torchtitan" / "data" / "settings.py").read_text()
    odd = "naïve 中文 \U0001f600 don't  DON'T\r\n\r\n 123456 \t x\n" * 5
    library = train_tokenizer.train(iter([source, odd]), vocab_size=700)
    file = tmp_path / "new.tiktoken"
    train_tokenizer.write_tiktoken(file, train_tokenizer.tokens_by_rank(library))
    ours = build_tokenizer(str(file))
    assert (ours.vocab_size, ours.eos_id) == (700, 699)
    for text in (source, odd, Path(__file__).read_text(), "".join(map(chr, range(1, 0xD800)))):
        assert ours.encode(text) == library.encode(text).ids


def test_training_on_files_merges_the_most_frequent_pairs(tmp_path: Path) -> None:
    paths = write_texts(tmp_path, {"a.txt": "low lower lowest " * 50, "b.txt": "newest widest"})
    file = tmp_path / "new.tiktoken"
    done = run("tokenizer", str(file), *paths, "--vocab_size", "262")
    assert (done.returncode, done.stdout) == (0, f"{file}: 260 tokens and 2 special ones\n")
    # the most frequent pairs, by hand: lo or ow come 150 times, then low, then " low" 149 times
    merged = list(read_ranks(file))[256:]
    assert merged[1] == b"low"
    assert set(merged) == {merged[0], b"low", b" low", merged[3]}
    assert merged[0] in {b"lo", b"ow"}


def test_vocabularies_below_the_bytes_are_refused(tmp_path: Path) -> None:
    done = run("tokenizer", str(tmp_path / "t"), "--vocab_size", "257")
    assert done.returncode == 2
    assert naming(258, 257).match(done.stderr)
