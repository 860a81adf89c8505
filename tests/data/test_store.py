"""Token stores: against a reader and a writer made from the format's description alone."""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from torchtitan.base.errors import DataError
from torchtitan.data import store as store_module
from torchtitan.data.store import TokenStore, open_writer

LETTERS = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}


def write_by_hand(
    prefix: Path, documents: list[list[list[int]]], *, code: int, modes: bool = False
) -> None:
    """Write documents of sequences of tokens, byte for byte as the format says."""
    letter = LETTERS[code]
    sequences = [sequence for document in documents for sequence in document]
    pointers, boundaries = [0], [0]
    for sequence in sequences:
        pointers.append(pointers[-1] + len(sequence) * struct.calcsize(letter))
    for document in documents:
        boundaries.append(boundaries[-1] + len(document))
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(struct.pack(f"<{len(tokens)}{letter}", *tokens))
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(boundaries))
    index += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    index += struct.pack(f"<{len(sequences)}q", *pointers[:-1])
    index += struct.pack(f"<{len(boundaries)}q", *boundaries)
    Path(f"{prefix}.idx").write_bytes(index + bytes(len(sequences) if modes else 0))


def read_by_hand(prefix: Path) -> tuple[int, list[list[list[int]]]]:
    """Return the type's code and the documents, reading as the format says."""
    index, tokens = Path(f"{prefix}.idx").read_bytes(), Path(f"{prefix}.bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    assert index[9:17] == struct.pack("<Q", 1)
    code = index[17]
    num_sequences, num_boundaries = struct.unpack("<QQ", index[18:34])
    lengths = struct.unpack_from(f"<{num_sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{num_sequences}q", index, 34 + 4 * num_sequences)
    boundaries = struct.unpack_from(f"<{num_boundaries}q", index, 34 + 12 * num_sequences)
    assert len(index) == 34 + 12 * num_sequences + 8 * num_boundaries
    sequences = [
        list(struct.unpack_from(f"<{length}{LETTERS[code]}", tokens, pointer))
        for length, pointer in zip(lengths, pointers, strict=True)
    ]
    return code, [sequences[first:last] for first, last in pairwise(boundaries)]


DOCUMENTS = [[[1, 2, 3]], [[4]], [[5, 6], [7, 100]]]


@pytest.mark.promise("token-stores")
@pytest.mark.parametrize("code", LETTERS)
@pytest.mark.parametrize("modes", [False, True])
def test_reads_what_others_write(tmp_path: Path, code: int, modes: bool) -> None:
    write_by_hand(tmp_path / "other", DOCUMENTS, code=code, modes=modes)
    store = TokenStore(tmp_path / "other")
    assert store.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 100]
    assert store.lengths.tolist() == [3, 1, 2, 2]
    assert store.document_starts.tolist() == [0, 1, 2, 4]
    assert (store.num_tokens, store.num_documents) == (8, 3)


@pytest.mark.promise("token-stores")
@pytest.mark.parametrize(("vocab_size", "code"), [(2**16, 8), (2**16 + 1, 4), (2**31 + 1, 5)])
def test_others_read_what_is_written(tmp_path: Path, vocab_size: int, code: int) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, vocab_size, n).tolist() for n in (5, 0, 1, 3000)]
    documents[0][0] = vocab_size - 1
    with open_writer(tmp_path / "new" / "ours", vocab_size=vocab_size) as writer:
        for document in documents:
            half = len(document) // 2
            writer.add(np.array(document[:half], np.int64), ends_document=False)
            writer.add(np.array(document[half:], np.int64), ends_document=True)
    assert read_by_hand(tmp_path / "new" / "ours") == (code, [[d] for d in documents])
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["ours.bin", "ours.idx"]


@pytest.mark.promise("token-stores")
def test_an_interrupted_writer_leaves_the_old_store(tmp_path: Path) -> None:
    write_by_hand(tmp_path / "kept", DOCUMENTS, code=8)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def interrupted() -> None:
        with open_writer(tmp_path / "kept", vocab_size=10) as writer:
            writer.add(np.array([1, 2]), ends_document=True)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def cut(file: str, size: int):  # type: ignore[no-untyped-def]
    return lambda folder: (folder / file).write_bytes((folder / file).read_bytes()[:size])


def put(offset: int, data: bytes):  # type: ignore[no-untyped-def]
    def damage(folder: Path) -> None:
        old = (folder / "s.idx").read_bytes()
        (folder / "s.idx").write_bytes(old[:offset] + data + old[offset + len(data) :])

    return damage


LENGTHS, STARTS, BOUNDARIES = 34, 34 + 4 * 4, 34 + 12 * 4
DAMAGE = [
    (lambda folder: (folder / "s.bin").unlink(), "s.bin"),
    (lambda folder: (folder / "s.idx").unlink(), "s.idx"),
    (put(0, b"version https://git-lfs.github.com"), "s.idx .*git lfs pull"),
    (cut("s.idx", 0), "s.idx"),
    (cut("s.idx", 33), "s.idx"),
    (cut("s.idx", 100), "s.idx"),
    (cut("s.bin", 14), "s.bin .*16.*14"),
    (cut("s.bin", 0), "s "),
    (put(0, b"MMIDIDY"), "s.idx"),
    (put(9, b"\x02"), "s.idx"),
    (put(17, b"\x07"), "s.idx"),
    (put(17, b"\x05"), "s.idx"),
    (put(18, b"\xff" * 8), "s.idx"),
    (put(BOUNDARIES + 8 * 3, b"\x09"), "s.idx"),
    # lengths 3, 1, 2, 2; sequences 2 and 3 are of document 2
    (put(LENGTHS, struct.pack("<i", -3)), "s.idx"),
    (put(LENGTHS + 4 * 2, struct.pack("<2i", 5, -1)), "s.idx"),
    (put(STARTS, b"\x02"), "s.idx"),
    (put(STARTS + 8, b"\x04"), "s.idx"),
    (put(STARTS + 24, b"\x0e"), "s.idx"),
    (put(STARTS, struct.pack("<2q", 2, 0)), "s.idx"),
    (put(BOUNDARIES + 8, struct.pack("<2q", 2, 1)), "s.idx"),
    (put(BOUNDARIES + 8, struct.pack("<q", -1)), "s.idx"),
    (put(BOUNDARIES + 8, struct.pack("<q", 5)), "s.idx"),
]


@pytest.mark.promise("token-stores")
@pytest.mark.parametrize("chunk", [1, 2, store_module.CHUNK])
def test_damage_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(store_module, "CHUNK", chunk)
    for damage, named in DAMAGE:
        write_by_hand(tmp_path / "s", DOCUMENTS, code=8)
        TokenStore(tmp_path / "s")
        damage(tmp_path)
        with pytest.raises(DataError, match=named):
            TokenStore(tmp_path / "s")
