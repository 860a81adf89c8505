"""Reading text: every format gives the same documents, and every fault is named with its place."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import lzma
import math
import random
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard

from torchtitan.base.errors import DataError
from torchtitan.data import readers
from torchtitan.data.corpus import Corpus, FileCorpus, StdlibCorpus
from torchtitan.data.synthetic import SyntheticCorpus


def documents(corpus: Corpus) -> list[str]:
    texts, text = [], ""
    for piece in corpus.pieces(lambda num_bytes: None):
        text += piece.text
        if piece.ends_document:
            texts.append(text)
            text = ""
    assert not text
    return texts


def documents_of(*files: Path, key: str = "text") -> list[str]:
    return documents(FileCorpus(files, key))


def in_halves(data: bytes, pack: Callable[[bytes], bytes]) -> bytes:
    """Compress in two streams, as tools that append or work in parallel do."""
    half = len(data) // 2
    return pack(data[:half]) + pack(data[half:])


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": lambda data: in_halves(data, bz2.compress),
    ".xz": lambda data: in_halves(data, lzma.compress),
    ".zst": lambda data: in_halves(data, zstandard.compress),
}
TEXTS = ["first\nline\r\n", "zwölf \U0001f600\n\n", " "]


@pytest.mark.parametrize("suffix", PACKERS)
def test_each_format_gives_the_same_documents(tmp_path: Path, suffix: str) -> None:
    pack = PACKERS[suffix]
    files = []
    for i, text in enumerate(TEXTS):
        files.append(tmp_path / f"{i}.txt{suffix}")
        files[-1].write_bytes(pack(text.encode()))
    assert documents_of(*files) == TEXTS
    lines = "".join(json.dumps({"id": i, "body": t}) + "\n\n" for i, t in enumerate([*TEXTS, ""]))
    file = tmp_path / f"all.jsonl{suffix}"
    file.write_bytes(pack(lines.encode()))
    assert documents_of(file, key="body") == TEXTS
    # no line end at the end, lines of Windows
    file.write_bytes(pack(lines.rstrip("\n").replace("\n", "\r\n").encode()))
    assert documents_of(file, key="body") == TEXTS


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_block_borders_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", block * 8)
    monkeypatch.setattr(readers, "PIECE_CHARS", block)
    text = "".join(random.Random(block).choices("aé中\U0001f600 \n", k=300))
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n" + '{"text": "b"}')
    for suffix, pack in PACKERS.items():
        file = tmp_path / f"a.txt{suffix}"
        file.write_bytes(pack(text.encode()))
        assert documents_of(file, lines) == [text, text, "b"]
    pieces = list(FileCorpus((tmp_path / "a.txt",), "").pieces(lambda n: None))
    assert max(len(piece.text) for piece in pieces) <= block


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\xef\xbb\xbf")
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "b"}')
    assert documents_of(tmp_path / "a.txt", tmp_path / "a.jsonl") == ["a\ufeff", "b"]


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("place", [0, 5, 2_500_001])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe4\xb8", b"\xed\xa0\x80"])
def test_text_that_is_no_utf8(tmp_path: Path, suffix: str, place: int, bad: bytes) -> None:
    data = ("é" * (place // 2) + "x" * (place % 2)).encode() + bad
    file = tmp_path / f"bad.txt{suffix}"
    for tail in (b"", b" more"):
        file.write_bytes(PACKERS[suffix](data + tail))
        with pytest.raises(DataError, match="must be UTF-8") as caught:
            documents_of(file)
        assert str(file) in str(caught.value)
        assert f"0x{bad[0]:02x} at byte offset {place}" in str(caught.value)
        assert ("decompressed" in str(caught.value)) == bool(suffix)


@pytest.mark.parametrize("suffix", PACKERS)
def test_json_lines_that_are_no_utf8(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"bad.jsonl{suffix}"
    good = '{"text": "é"}\r\n\n'.encode()
    file.write_bytes(PACKERS[suffix](good + b'{"text": "\xe9"}\n' + good))
    with pytest.raises(DataError, match=f"line 3 .*byte offset {len(good) + 10}"):
        documents_of(file)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 must be one JSON object"),
        ('{"text": "a"} x', "line 2 must be one JSON object"),
        ("[1]", "line 2 must be one JSON object, got an array"),
        ("[", "line 2 must be one JSON object"),
        ("{\n", "line 2 must be one JSON object"),
        ('"text"', "line 2 must be a JSON object, got text, 'text'"),
        (
            '{"body": "a", "id": 1}',
            "^dataset_text_key: .* line 2 .* got keys 'body', 'id'",
        ),
        ("{}", "^dataset_text_key: .* line 2 .* got keys none"),
        ('{"text": null}', "line 2 must have text under the key 'text', got null"),
        ('{"text": 5}', "line 2 must have text under the key 'text', got a number, 5"),
        ('{"text": true}', "line 2 .* got true or false, True"),
        ('{"text": ["a"]}', "line 2 .* got an array"),
        ("[" * 100_000, "line 2 must be one JSON object"),
        ('{"messages": [], "id": 1}', r'got keys .*dataset = "examples"'),
        ('{"prompt": "a", "completion": "b"}', r'got keys .*dataset = "examples"'),
        ('{"text": "a", "text": "b"}', "line 2 .* key 'text' more than once"),
        ('{"text": "a", "more": {"x": 1, "x": 1}}', "line 2 .* key 'x' more than once"),
        ('{"text": "a", "id": ' + "9" * 5000 + "}", "line 2 .*4300 digits.*has 5000 digits"),
        ('{"text": "a"}\r{"text": "b"}', r"line 2 must be one JSON object: .*\\n"),
        (r'{"text": "ab\ud800"}', "line 2 .* character 2 .* surrogate"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(DataError, match=said) as caught:
        documents_of(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_damaged_packed_files(tmp_path: Path, suffix: str) -> None:
    noise = random.Random(0).choices("abcdefgh", k=5000)
    packed = PACKERS[suffix]("".join(noise).encode())
    file = tmp_path / f"a.txt{suffix}"
    for data in (packed[:-1], packed[: len(packed) // 3], b"plain text", packed + b"x"):
        file.write_bytes(data)
        with pytest.raises(DataError, match=f"cannot read {file}"):
            documents_of(file)


@pytest.mark.parametrize(
    ("name", "data"), [("a.jsonl", b"\n\n"), ("a.txt.gz", gzip.compress(b""))], ids=["jsonl", "gz"]
)
def test_files_without_text(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match="holds no text"):
        documents_of(tmp_path / name)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        documents_of(tmp_path / "gone.txt")


def test_identity_changes_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    first = FileCorpus((file,), "text").identity()
    assert FileCorpus((file,), "text").identity() == first
    assert FileCorpus((file,), "body").identity() != first
    file.write_text("two")
    assert FileCorpus((file,), "text").identity() != first


def test_large_files_stream(tmp_path: Path) -> None:
    file = tmp_path / "large.txt.gz"
    file.write_bytes(gzip.compress(b"0123456789 a line of a large file\n" * 1_000_000))
    tracemalloc.start()
    size = sum(len(p.text) for p in FileCorpus((file,), "").pieces(lambda n: None))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == 34_000_000
    assert peak < 16_000_000


def zst_bomb(num_blocks: int) -> bytes:
    """A frame of blocks that are one letter 128 KiB times, 4 bytes each."""
    last = ((128 << 10) << 3 | 1 << 1 | 1).to_bytes(3, "little") + b"a"
    block = ((128 << 10) << 3 | 1 << 1).to_bytes(3, "little") + b"a"
    return b"\x28\xb5\x2f\xfd\x00\x58" + block * (num_blocks - 1) + last


@pytest.mark.parametrize(
    "name", ["a.txt.zst", "a.jsonl.zst", "a.txt.gz", "a.jsonl.GZ", "a.txt.bz2", "a.txt.xz"]
)
def test_packed_files_that_grow_as_no_text_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(readers, "FREE_BYTES", 1 << 22)
    file = tmp_path / name
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    num = 32 << 20
    packed = zst_bomb(8000) if "zst" in name else pack[file.suffix.lower()](b"a" * num)
    file.write_bytes(packed)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"over 400 times its size.*") as caught:
        documents_of(file)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert str(file) in str(caught.value)
    assert peak < 150_000_000


def test_the_bomb_is_one_that_zstd_reads(tmp_path: Path) -> None:
    file = tmp_path / "a.txt.zst"
    file.write_bytes(zst_bomb(8))
    assert documents_of(file) == ["a" * (8 * 128 << 10)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "aaaa', '\'{"text": "aaaa.*; cut it into documents'),
        (b"  [{", "cut it into documents"),
    ],
)
def test_lines_that_cannot_be_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, said: str
) -> None:
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1 << 20)
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "b"}\n' + line + b"a" * (3 << 20))
    with pytest.raises(DataError, match=f"a line of {file} is longer than 1 MiB.*{said}"):
        documents_of(file)


def test_progress_adds_up(tmp_path: Path) -> None:
    for suffix, pack in PACKERS.items():
        (tmp_path / f"a.txt{suffix}").write_bytes(pack(b"text\n" * 100_000))
    corpora = [FileCorpus(tuple(tmp_path.iterdir()), "text"), StdlibCorpus()]
    for corpus in corpora:
        read: list[int] = []
        for _ in corpus.pieces(read.append):
            pass
        assert sum(read) == corpus.num_bytes


def test_stdlib_is_real_text() -> None:
    corpus = StdlibCorpus()
    texts = documents(corpus)
    assert sum(map(len, texts)) > 3_000_000
    assert any("class OrderedDict" in text for text in texts)
    names = [path.as_posix() for path in corpus.files]
    assert not any("/site-packages/" in name or "/test/" in name for name in names)
    assert documents(StdlibCorpus()) == texts


def test_stdlib_leaves_out_what_breaks_its_own_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\nx = '\xe9'\n")
    (tmp_path / "wrong.py").write_bytes(b"x = '\xe9'\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: klingon\n")
    (tmp_path / "empty.py").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert documents(StdlibCorpus()) == ["# coding: latin-1\nx = 'é'\n"]
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "none"))
    with pytest.raises(DataError, match="holds none; use 'synthetic'"):
        documents(StdlibCorpus())


def entropy(counts: Counter[str] | Counter[tuple[str, str]]) -> float:
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values())


def test_synthetic_text_is_learnable() -> None:
    words = " ".join(documents(SyntheticCorpus())).lower().replace(".", "").split()
    alone = entropy(Counter(words))
    after_another = entropy(Counter(pairwise(words))) - alone
    assert len(set(words)) == SyntheticCorpus.num_words
    assert after_another < 0.6 * alone


def test_synthetic_text_is_the_same_everywhere() -> None:
    texts = documents(SyntheticCorpus())
    assert sum(map(len, texts)) >= SyntheticCorpus().num_bytes
    # pinned: it must be the same on every machine, Python version and release of ours
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    assert digest == "25fecdaa2d056294f7359064220eb495bec58d1508e137dee9a39b28b57a2386"


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress)])
def test_zeros_after_a_stream_are_padding_in_gzip_and_damage_elsewhere(
    suffix: str, pack: Callable[[bytes], bytes]
) -> None:
    text = b"text\n" * 99

    def read(content: bytes) -> bytes:
        return b"".join(readers.DECOMPRESSORS[suffix](io.BytesIO(content)))

    padded = pack(text) + b"\0" * 2048
    if suffix == ".gz":
        assert read(padded) == text
    else:
        with pytest.raises(OSError, match="Invalid data stream"):
            read(padded)
    with pytest.raises((OSError, zlib.error)):
        read(b"\0" * 16 + pack(text))
