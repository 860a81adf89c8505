"""Files of rows: in any format the same rows give the same tokens, and faults have their place."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from tests.data.helpers import dataset_of
from torchtitan.base.errors import DataError
from torchtitan.data import parts, rows_json, rows_table
from torchtitan.data.files import find_files
from torchtitan.data.prepare import cached_store
from torchtitan.data.source import FileCorpus
from torchtitan.data.tokenizer import ByteTokenizer

TEXTS = ['quotes " and, commas\nand lines\r\n', "zwölf \U0001f600 \\n\t", "'", "", " ", "end" * 900]
ROWS = [{"id": str(i), "text": text, "title": f"{{{i}}}"} for i, text in enumerate(TEXTS)]


def lines(values: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in values).encode()


def table(values: list[dict[str, str]], delimiter: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [*values[0]], delimiter=delimiter)
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


def zipped(members: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return file.getvalue()


def tarred(members: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            if not name.endswith("/"):
                info.size = len(data)
            else:
                info.type = tarfile.DIRTYPE
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


MEMBERS = {"a/": b"", "a/1.jsonl": lines(ROWS[:2]), "b.csv.gz": gzip.compress(table(ROWS[2:], ","))}
OF_MACOS = {"__MACOSX/a/._1.jsonl": b"\0", ".DS_Store": b"\0", **MEMBERS, "a/._b.csv": b"\0"}
FORMATS: dict[str, Callable[[], bytes]] = {
    "a.json": lambda: lines(ROWS),
    "array.json": lambda: json.dumps(ROWS, indent=1).encode(),
    "dense.json": lambda: (
        b"\xef\xbb\xbf\n" + json.dumps(ROWS, separators=(",", ":")).encode() + b" \n"
    ),
    "a.json.gz": lambda: gzip.compress(json.dumps(ROWS, ensure_ascii=False).encode()),
    "a.csv": lambda: table(ROWS, ","),
    "b.csv.zst": lambda: zstandard.compress(b"\xef\xbb\xbf" + table(ROWS, ",")),
    "a.TSV": lambda: table(ROWS, "\t"),
    "a.parquet": lambda: parquet(ROWS),
    "file.arrow": lambda: arrow(ROWS, pa.ipc.new_file),
    "stream.arrow": lambda: arrow(ROWS, pa.ipc.new_stream),
    "a.zip": lambda: zipped(MEMBERS),
    "stored.zip": lambda: zipped(MEMBERS, zipfile.ZIP_STORED),
    "macos.zip": lambda: zipped(OF_MACOS),
    "a.tar": lambda: tarred(MEMBERS),
    "macos.tar": lambda: tarred(OF_MACOS),
    "a.tgz": lambda: gzip.compress(tarred(MEMBERS)),
    "a.tar.zst": lambda: zstandard.compress(tarred(MEMBERS)),
}


def hash_of(folder: Path, *files: Path, template: str | None = None) -> str:
    corpus = FileCorpus(files, "text", template)
    store = cached_store(corpus, tokenizer=ByteTokenizer(), cache=str(folder / "cache"))
    return store.content_hash()


def read(file: Path, *, key: str = "text", template: str | None = None) -> list[str]:
    pieces = FileCorpus((file,), key, template).pieces(lambda num_bytes: None)
    return [piece.text for piece in pieces]


def test_rows_of_any_format_are_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: set[str] = set()
    for block in (parts.BLOCK_BYTES, 8):
        # many borders of blocks, also inside characters and items
        monkeypatch.setattr(parts, "BLOCK_BYTES", block)
        for name, made in {"a.jsonl": lambda: lines(ROWS), **FORMATS}.items():
            file = tmp_path / str(block) / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(made())
            for template in (None, "{title}\n{{{text}}}"):
                wanted.add(hash_of(tmp_path, file, template=template))
                assert len(wanted) == 1 + (block == 8 or name != "a.jsonl" or template is not None)
    assert read(file, template="{title}: {{{text}}}")[0] == "{0}: {" + TEXTS[0] + "}"


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
    with pytest.raises(DataError, match=r"several saved datasets: test, train; name one, as .*/te"):
        find_files(str(tmp_path / "splits"))
    files[1].unlink()
    with pytest.raises(
        DataError, match=r"data-00001.* is missing, which .*state\.json lists; save"
    ):
        find_files(str(tmp_path / "saved"))
    (tmp_path / "saved" / "state.json").write_text("[]")
    with pytest.raises(DataError, match=r"state\.json must list the files .*; save it anew"):
        find_files(str(tmp_path / "saved"))


def test_the_hub_is_refused_with_a_way() -> None:
    with pytest.raises(
        DataError, match=r"'hf://a/b' .* nothing is streamed here; .*HubText.*save_to_disk"
    ):
        find_files("hf://a/b")


def test_progress_adds_up(tmp_path: Path) -> None:
    for name, made in FORMATS.items():
        file = tmp_path / name
        file.write_bytes(made())
        done: list[int] = []
        for _ in FileCorpus((file,), "text").pieces(done.append):
            pass
        # of some the end is read twice, to find the rest
        size = file.stat().st_size
        assert (
            size <= sum(done) <= (3 if name.endswith(("arrow", "parquet", "zip")) else 1) * size
        ), name


WIDE = [{"text": "a" * 4000, "more": str(i) * 4000} for i in range(8000)]


@pytest.mark.parametrize("name", ["a.json", "a.parquet", "a.arrow"])
def test_memory_is_bounded(tmp_path: Path, name: str) -> None:
    made = {
        "a.json": lambda: json.dumps(WIDE).encode(),
        "a.parquet": lambda: parquet(WIDE),
        "a.arrow": lambda: arrow(WIDE, pa.ipc.new_stream),
    }
    file = tmp_path / name
    file.write_bytes(made[name]())
    corpus = FileCorpus((file,), "text")
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    most = size = 0
    for piece in corpus.pieces(lambda num_bytes: None):
        size += len(piece.text)
        most = max(most, pa.total_allocated_bytes() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 32_000_000
    assert peak < 12_000_000
    assert most < 12_000_000


def shared(num_rows: int, length: int) -> pa.Table:
    """Return rows that are all the same long text, which is stored once."""
    indices = pa.array([0] * num_rows, pa.int32())
    return columns(text=pa.DictionaryArray.from_arrays(indices, pa.array(["a" * length])))


def packed_parquet(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd", store_schema=False)
    return file.getvalue()


def packed_arrow(table: pa.Table) -> bytes:
    file = io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_long_value_that_rows_share_is_held_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Rows of 250 MB may be a file of less than 1 KiB."""
    monkeypatch.setattr(rows_table, "MAX_LINE_BYTES", 8 << 20)
    pack = packed_parquet if name == "a.parquet" else packed_arrow
    (tmp_path / name).write_bytes(pack(shared(250, 1_000_000)))
    before, most, size = pa.total_allocated_bytes(), 0, 0
    tracemalloc.start()
    for piece in FileCorpus((tmp_path / name,), "text").pieces(lambda num_bytes: None):
        size += len(piece.text)
        most = max(most, pa.total_allocated_bytes() - before)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 250_000_000
    assert max(most, peak) < 40_000_000


def test_a_table_that_unpacks_as_no_text_does_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_table, "FREE_BYTES", 1 << 20)
    (tmp_path / "a.parquet").write_bytes(packed_parquet(shared(1, 4_000_000)))
    with pytest.raises(DataError, match=r"a\.parquet unpacks to over 400 times its size"):
        read(tmp_path / "a.parquet")


def test_a_row_of_quoted_line_ends_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field holds a line end, so that the lines are one row."""
    monkeypatch.setattr(rows_table, "MAX_LINE_BYTES", 1 << 12)
    (tmp_path / "a.csv").write_text("text\n" + '"\n",' * 5000)
    with pytest.raises(DataError, match=r"a\.csv line 2 is longer"):
        read(tmp_path / "a.csv")


def nested(value: object) -> list[dict[str, object]]:
    return [{"text": "a"}, {"text": value}]


def columns(**of: object) -> pa.Table:
    return pa.table(of)


def as_parquet(whole: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(whole, file)
    return file.getvalue()


def wrong_utf8() -> bytes:
    text = pa.Array.from_buffers(
        pa.string(), 2, [*pa.array(["ab", "cd"]).buffers()[:2], pa.py_buffer(b"ab\xffd")]
    )
    return as_parquet(columns(text=text))


def cut(data: bytes, part: float = 0.7) -> bytes:
    return data[: int(len(data) * part)]


def link() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("a.txt")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(info)
    return file.getvalue()


def encrypted() -> bytes:
    data = bytearray(zipped({"a.txt": b"text"}))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    return bytes(data)


MISSING = r"must have text under the key 'text', got keys 'body', 'id'; .*name the key"
WHOLE = parquet([{"text": row["text"]} for row in ROWS])
SPOILT = WHOLE[:4] + b"\xff" * 60 + WHOLE[64:]
FAULTS: dict[str, list[tuple[bytes, str]]] = {
    "a.json": [
        (b"[]", "holds no text; remove it"),
        (b'[{"text": "a"}', "item 1 must be followed by , or ], got the end of the file; mend"),
        (b'[{"text": "a"} {"text": "b"}]', "item 1 must be followed by , or ], got '{'"),
        (b'[{"text": "a"}, {"text": "b', r"item 2 must be a JSON object: Unterminated.*; mend"),
        (b'[{"text": "a"},]', "item 2 must be a JSON object: Expecting value; mend the array"),
        (b'[{"text": "a"}, nul]', "item 2 must be a JSON object: Expecting value"),
        (b'[{"text": "a"}] [1]', "must end with its array, got '\\[' after item 1; .*jq -c"),
        (b'[{"text": "a", "text": "b"}]', "item 1 .* key 'text' more than once"),
        (b"[" * 100_000, "item 1 must be a JSON object: "),
        (b"[[1]]", "item 1 must be a JSON object, got an array"),
        (b"[17]", "item 1 must be a JSON object, got a number, 17"),
        (
            b'[{"text": "a"}, {"text": null}]',
            "item 2 must have text .*, got null; write text there",
        ),
        (b'[{"body": "a", "id": 1}]', f"item 1 {MISSING}"),
        (b'[{"text": "a\xff"}]', r"must be UTF-8: .* invalid byte 0xff at byte offset 12; convert"),
        (rb'[{"text": "\ud800"}]', "item 1 must hold whole characters"),
    ],
    "a.csv": [
        (b"text\n", "holds no text; remove it"),
        (b"body,id\na,1\n", f"line 2 {MISSING}"),
        (b"text;id\na;1\n", "line 2 must have text .*got keys 'text;id'"),
        (b"text,text\na,b\n", "line 1 must name each column once, got 'text' twice"),
        (
            b'text,id\n"a\nb",1\nc\n',
            r"line 4 must have 2 values, as the first row, got 1; put .*qu",
        ),
        (b"text,id\na,b,1\n", r"line 2 must have 2 values, .*, got 3; put values with ','"),
        (b'text\na\n"b" c\n', r"line 3 must be a row of ','-separated values: .*twice: \"\""),
        (b'text\n"a\nb\nc', "line 2 must be a row .*: unexpected end of data"),
        (b"text\na\xe9\n", "line 2 has an invalid byte 0xe9 at byte offset 6; .*iconv"),
        (b"text\ra\rb", r"line 1 must be a row .*: new-line character"),
    ],
    "a.parquet": [
        (as_parquet(columns(text=pa.array([], pa.string()))), "holds no text; remove it"),
        (as_parquet(columns(body=["a"], id=["b"])), f"row 1 {MISSING}"),
        (as_parquet(columns(text=["a", None])), "row 2 must have text .*got null; write text"),
        (as_parquet(columns(text=[1])), "row 1 must have text .*got a number, 1"),
        (as_parquet(columns(text=[b"a"])), "row 1 must have text .*got bytes, b'a'"),
        (as_parquet(columns(text=[["a"]])), "row 1 must have text .*got an array"),
        (as_parquet(columns(text=[{"a": "b"}])), "row 1 must have text .*got an object"),
        (cut(parquet(ROWS)), r"cannot read .*a\.parquet.*cut short or damaged"),
        (SPOILT, r"cannot read .*a\.parquet"),
        (b"text,id\n", r"cannot read .*a\.parquet"),
        (
            as_parquet(columns(text=pa.array([1], pa.timestamp("ns")))),
            r"row 1 must have text .*got |cannot read .*a\.parquet after row 0",
        ),
        (wrong_utf8(), r"cannot read .*a\.parquet after row 0: .*UTF8"),
        (b"version https://git-lfs.github.com/spec", "git lfs pull"),
    ],
    "a.arrow": [
        (as_parquet(columns(text=["a"])), r"cannot read .*a\.arrow"),
        (cut(arrow(ROWS, pa.ipc.new_stream)), r"cannot read .*a\.arrow: Expected"),
        (arrow(ROWS, pa.ipc.new_stream)[:-8], "the stream has no end"),
        (cut(arrow(ROWS, pa.ipc.new_file)), r"cannot read .*a\.arrow"),
        (arrow([{"body": "a", "id": "b"}], pa.ipc.new_file), f"row 1 {MISSING}"),
    ],
    "a.zip": [
        (zipped({}), "holds no text; remove it"),
        *(
            (zipped({"a.txt": b"a"}, how), r"a\.zip/a\.txt is packed in another .*; pack it anew")
            for how in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)
        ),
        (cut(zipped(MEMBERS)), r"cannot read .*a\.zip: it is cut short or damaged"),
        (zipped({"b/a.jsonl": b'{"text": "a"}\n{'}), r"a\.zip/b/a\.jsonl line 2 must be one JSON"),
        (
            zipped({"a.txt": b"a", "b.bin": b"b"}),
            r"a\.zip/b\.bin: token store is not read in an ar",
        ),
        (
            zipped({"a.parquet": parquet(ROWS)}),
            r"a\.zip/a\.parquet: Parquet is not read in an arch",
        ),
        (zipped({"a.tar": tarred(MEMBERS)}), r"a\.zip/a\.tar: tar archive is not .*; unpack that"),
        (zipped({"a.txt": b"a", "b.png": b"b"}), r"a\.zip/b\.png is an image; .*leave it out"),
        (zipped({"a.txt": b"a", "b.xyz": b"b"}), r"a\.zip/b\.xyz has the suffix '\.xyz'"),
        (zipped({"a.txt": b"a", "b.txt": b"bc\0"}), r"a\.zip/b\.txt has one at byte offset 2"),
        (zipped({"a.txt": b"a\xff" * 9}), r"a\.zip/a\.txt has an invalid byte"),
        (encrypted(), r"a\.zip/a\.txt is encrypted; unpack"),
        (zipped({"a.txt": b"a" * (8 << 20)}), "over 400 times its size"),
    ],
    "a.tar": [
        (tarred({}), "holds no text; remove it"),
        (tarred(MEMBERS)[: 3 * 512 + 100], r"cannot read .*a\.tar.*: it is cut short or damaged"),
        (tarred({"a.txt": b"a", "b.txt": b"b"})[:1024], "the archive has no end"),
        (tarred({"a.txt": b"a", "b.txt": b"b"})[:1500], "the archive has no end"),
        (b"no archive" * 99, r"cannot read .*a\.tar: it is cut short or damaged"),
        (tarred({"/etc/a.jsonl": b"{"}), r"a\.tar/etc/a\.jsonl line 1 must be one JSON object"),
        (link(), r"a\.tar/a\.txt is a link or a device; unpack"),
        (tarred({"a.zip": b""}), r"a\.tar/a\.zip: zip archive is not read in an archive"),
    ],
}
CASES = [(name, data, said) for name, cases in FAULTS.items() for data, said in cases]


@pytest.mark.parametrize(("name", "data", "said"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_faults_have_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, said: str
) -> None:
    monkeypatch.setattr(parts, "FREE_BYTES", 1 << 20)
    file = tmp_path / name
    file.write_bytes(data)
    with pytest.raises(DataError, match=said) as caught:
        read(file)
    assert str(file) in str(caught.value)


def test_an_item_that_cannot_be_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_json, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "a.json").write_bytes(b'[{"text": "b"}, {"text": "' + b"a" * (8 << 20))
    with pytest.raises(DataError, match=r"item 2 .*longer than 1 MiB"):
        read(tmp_path / "a.json")


def test_a_template_names_the_key_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(ROWS))
    with pytest.raises(DataError, match=r"^dataset_text_template: .*row 1 .* key 'body', got keys"):
        read(tmp_path / "a.parquet", template="{title} {body}")


def test_a_template_is_part_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(table(ROWS, ","))
    plain, template = (
        dataset_of(tmp_path, dataset_path=[str(file)], dataset_text_template=template)
        for template in (None, "{id} {text}")
    )
    assert plain.fingerprint["data"] != template.fingerprint["data"]


def test_a_mixture_is_a_table_of_paths_and_weights(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.csv", "b.txt")]
    (tmp_path / "a.csv").write_bytes(table(ROWS, ","))
    (tmp_path / "b.txt").write_text("other words " * 300)
    one = dataset_of(tmp_path, dataset_path=paths, dataset_weights=(0.75, 0.25))
    mixture = {paths[0]: 3.0, paths[1]: 1.0}
    other = dataset_of(tmp_path, dataset="files", dataset_path=(), dataset_mixture=mixture)
    assert other.fingerprint == one.fingerprint
    assert [other.sample_hash(k) for k in range(40)] == [one.sample_hash(k) for k in range(40)]


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(parquet(ROWS))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\.parquet needs the package 'pyarrow'; .*\.\[data\]'"):
        read(tmp_path / "a.parquet")
