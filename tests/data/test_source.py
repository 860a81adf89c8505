"""Reading text: every format gives the same documents, and every fault is named with its place."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from torchtitan.base.errors import DataError
from torchtitan.data import readers
from torchtitan.data.corpus import Corpus, file_corpus


def documents(corpus: Corpus) -> list[str]:
    texts, text = [], ""
    for piece in corpus.pieces():
        text += piece.text
        if piece.ends_document:
            texts.append(text)
            text = ""
    assert not text
    return texts


def documents_of(*files: Path, key: str = "text") -> list[str]:
    return documents(file_corpus(files, key))


def in_halves(data: bytes, pack: Callable[[bytes], bytes]) -> bytes:
    """Compress in two streams, as tools that append or work in parallel do."""
    half = len(data) // 2
    return pack(data[:half]) + pack(data[half:])


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
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
    # also without a line end at the end, and with lines of Windows
    for written in (lines, lines.rstrip("\n").replace("\n", "\r\n")):
        file.write_bytes(pack(written.encode()))
        assert documents_of(file, key="body") == TEXTS


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_block_borders_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(readers, "BLOCK_BYTES", block * 8)
    monkeypatch.setattr(readers, "BLOCK_CHARS", block)
    text = "".join(random.Random(block).choices("aé中\U0001f600 \n", k=300))
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n" + '{"text": "b"}')
    for suffix, pack in PACKERS.items():
        file = tmp_path / f"a.txt{suffix}"
        file.write_bytes(pack(text.encode()))
        assert documents_of(file, lines) == [text, text, "b"]
    pieces = list(file_corpus((tmp_path / "a.txt",), "").pieces())
    assert max(len(piece.text) for piece in pieces) <= block


LINE = '{"text": "é"}\r\n\n'.encode()
FAULTS: list[tuple[str, bytes, list[str]]] = [
    ("a.txt", b"\xff", ["0xff"]),
    ("a.txt", ("é" * 1_250_000 + "x").encode() + b"\xe4\xb8", ["end of data"]),
    ("a.txt", b"", []),
    ("a.jsonl", b"\n\n", []),
    ("a.jsonl", LINE + b'{"text": "\xe9"}\n' + LINE, ["line 3", "0xe9"]),
    ("a.jsonl", LINE + b'{"text": "a"} x', ["line 3"]),
    ("a.jsonl", LINE + b"[1]", ["line 3", "[1]"]),
    ("a.jsonl", LINE + b'{"body": "a", "id": 1}', ["dataset_text_key", "'body', 'id'"]),
    ("a.jsonl", LINE + b'{"text": null}', ["line 3", "'text'", "None"]),
    ("a.jsonl", LINE + b'{"text": 5}', ["5"]),
    ("a.jsonl", LINE + b"[" * 100_000, ["line 3"]),
    ("a.jsonl", LINE + rb'{"text": "ab\ud800"}', ["character 2"]),
    ("a.jsonl", LINE + b'{"text": "ab\xed\xa0\x80"}', ["character 2"]),
]


@pytest.mark.parametrize("suffix", PACKERS)
def test_faults_of_text_name_file_and_line(tmp_path: Path, suffix: str) -> None:
    for name, data, values in FAULTS:
        file = tmp_path / f"{name}{suffix}"
        file.write_bytes(PACKERS[suffix](data))
        with pytest.raises(DataError) as caught:
            documents_of(file)
        for value in (str(file), *values):
            assert value in str(caught.value)
