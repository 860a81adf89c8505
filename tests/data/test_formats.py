"""Files of rows: in any format the same rows give the same tokens, and faults have their place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from torchtitan.base.errors import DataError
from torchtitan.data import readers
from torchtitan.data.corpus import file_corpus
from torchtitan.data.files import find_files
from torchtitan.data.prepare import cached_store
from torchtitan.data.tokenizer import ByteTokenizer

TEXTS = ['quotes " and, commas\nand lines\r\n', "zwölf \U0001f600 \\n\t", "'", "", " ", "end" * 900]
ROWS = [{"id": str(i), "text": text, "title": f"{{{i}}}"} for i, text in enumerate(TEXTS)]


def lines(values: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values).encode()


def table(values: list[dict[str, str]]) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [*values[0]])
    writer.writeheader()
    writer.writerows(values)
    return file.getvalue().encode()


def parquet(values: list[dict[str, str]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(values), file, row_group_size=2)
    return file.getvalue()


def arrow(values: list[dict[str, str]], new: Callable[..., pa.RecordBatchWriter]) -> bytes:
    file = io.BytesIO()
    whole = pa.Table.from_pylist(values)
    with new(file, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=4)
    return file.getvalue()


FORMATS: dict[str, Callable[[], bytes]] = {
    "a.json": lambda: lines(ROWS),
    "array.json": lambda: json.dumps(ROWS, indent=1).encode(),
    "dense.json": lambda: (
        b"\xef\xbb\xbf\n" + json.dumps(ROWS, separators=(",", ":")).encode() + b" \n"
    ),
    "a.JSON.GZ": lambda: gzip.compress(json.dumps(ROWS, ensure_ascii=False).encode()),
    "a.csv": lambda: table(ROWS),
    "b.csv.zst": lambda: zstandard.compress(b"\xef\xbb\xbf" + table(ROWS)),
    "a.parquet": lambda: parquet(ROWS),
    "file.arrow": lambda: arrow(ROWS, pa.ipc.new_file),
    "stream.arrow": lambda: arrow(ROWS, pa.ipc.new_stream),
}


def hash_of(folder: Path, *files: Path, template: str | None = None) -> str:
    corpus = file_corpus(files, "text", template)
    store = cached_store(corpus, tokenizer=ByteTokenizer(), cache=str(folder / "cache"))
    return store.content_hash()


def read(file: Path, *, key: str = "text", template: str | None = None) -> list[str]:
    pieces = file_corpus((file,), key, template).pieces()
    return [piece.text for piece in pieces]


@pytest.mark.promise("token-stores")
def test_rows_of_any_format_are_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: set[str] = set()
    for block in (readers.BLOCK_BYTES, 8):
        # many borders of blocks, also inside characters and items
        monkeypatch.setattr(readers, "BLOCK_BYTES", block)
        monkeypatch.setattr(readers, "BLOCK_CHARS", block)
        for name, made in {"a.jsonl": lambda: lines(ROWS), **FORMATS}.items():
            file = tmp_path / str(block) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(made())
            for template in (None, "{title}\n{{{text}}}"):
                wanted.add(hash_of(tmp_path, file, template=template))
                assert len(wanted) == 1 + (block == 8 or name != "a.jsonl" or template is not None)
    assert read(file, template="{title}: {{{text}}}")[0] == "{0}: {" + TEXTS[0] + "}"


@pytest.mark.promise("token-stores")
def test_a_dataset_saved_by_datasets(tmp_path: Path) -> None:
    whole = datasets.Dataset.from_list(ROWS)
    (tmp_path / "a.jsonl").write_bytes(lines(ROWS))
    whole.select(range(len(ROWS))).save_to_disk(tmp_path / "saved", num_shards=3)
    # what its library leaves beside is not data
    (tmp_path / "saved" / "cache-1.arrow").write_bytes(b"no")
    files = find_files(str(tmp_path / "saved"))
    assert [file.name[:10] for file in files] == [f"data-0000{i}" for i in range(3)]
    assert hash_of(tmp_path, *files) == hash_of(tmp_path, tmp_path / "a.jsonl")
    splits = datasets.DatasetDict({"train": whole, "test": whole})
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(DataError, match="test, train"):
        find_files(str(tmp_path / "splits"))
    files[1].unlink()
    with pytest.raises(DataError, match="data-00001"):
        find_files(str(tmp_path / "saved"))
    (tmp_path / "saved" / "state.json").write_text("[]")
    with pytest.raises(DataError, match=r"saved/state\.json"):
        find_files(str(tmp_path / "saved"))


class Attack:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.promise("no-code-from-data")
@pytest.mark.parametrize("name", ["a.arrow", "a.parquet", "saved"])
def test_reading_runs_no_code(tmp_path: Path, name: str) -> None:
    """A type of Arrow that older libraries unpickle, and a saved dataset of files elsewhere."""
    payload = pickle.dumps(Attack(tmp_path / "run"))
    pickle.loads(payload)
    (tmp_path / "run").rmdir()  # the attack works
    metadata = {
        "ARROW:extension:name": "arrow.py_extension_type",
        "ARROW:extension:metadata": payload,
    }
    field = pa.field("text", pa.string(), metadata=metadata)
    whole = pa.table([pa.array(["a"])], schema=pa.schema([field]))
    file = tmp_path / ("a.arrow" if name == "saved" else name)
    if name == "a.parquet":
        pq.write_table(whole, file)
    else:
        with pa.ipc.new_stream(file, whole.schema) as writer:
            writer.write_table(whole)
    if name == "saved":
        (tmp_path / "saved").mkdir()
        state = json.dumps({"_data_files": [{"filename": "../a.arrow"}]})
        (tmp_path / "saved" / "state.json").write_text(state)
        with pytest.raises(DataError, match=r"saved/state\.json"):
            find_files(str(tmp_path / "saved"))
    else:
        assert read(file) == ["a"]
    assert not (tmp_path / "run").exists()


WIDE = [{"text": "a" * 4000, "more": str(i) * 4000} for i in range(3000)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    made = {
        "a.jsonl": lambda: lines(WIDE),
        "a.parquet": lambda: parquet(WIDE),
        "a.arrow": lambda: arrow(WIDE, pa.ipc.new_stream),
    }
    file = tmp_path / name
    file.write_bytes(made[name]())
    corpus = file_corpus((file,), "text")
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    most = size = 0
    for piece in corpus.pieces():
        size += len(piece.text)
        most = max(most, pa.total_allocated_bytes() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 12_000_000
    assert peak < 8_000_000
    assert most < 8_000_000


def columns(**of: object) -> pa.Table:
    return pa.table(of)


def as_parquet(whole: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(whole, file)
    return file.getvalue()


FAULTS: dict[str, list[tuple[bytes, str]]] = {
    "a.json": [
        (b"[" * 100_000, ""),
        (b'[{"text": "a"}, {"text": null}]', "item 2 .*None"),
        (b'[{"body": "a", "id": 1}]', "item 1 .*'text'.*'body', 'id'"),
    ],
    "a.csv": [
        (b"text;id\na;1\n", "line 2 .*'text;id'"),
        (b'text,id\n"a\nb",1\nc\n', "line 3.*'text', 'id'"),
        (b'text\na\n"b" c\n', "line 2"),
        (b"text\na\xe9\n", "0xe9"),
    ],
    "a.parquet": [
        (as_parquet(columns(body=["a"], id=["b"])), "row 1 .*'text'.*'body', 'id'"),
        (as_parquet(columns(text=["a", None])), "row 2 .*None"),
        (parquet(ROWS)[:-50], ""),
        (b"version https://git-lfs.github.com/spec", "git lfs pull"),
    ],
    "a.arrow": [
        (as_parquet(columns(text=["a"])), ""),
        (arrow(ROWS, pa.ipc.new_stream)[:-300], ""),
        (arrow(ROWS, pa.ipc.new_stream)[:-8], ""),  # whole batches, without the end
    ],
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_name_their_file_and_row(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    for data, values in FAULTS[name]:
        file.write_bytes(data)
        with pytest.raises(DataError, match=values or None) as caught:
            read(file)
        assert str(file) in str(caught.value)
