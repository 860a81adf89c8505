"""Data to validate on that are trained on too: found by file and by document, with bounded work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.test_split import END, TEXTS, build, examples_of, job_of, write
from tests.data.test_store import write_by_hand
from tests.distributed import jobs
from tests.finetune.chats import write_lines
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.job import load_config
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.check import overlap
from torchtitan.tools.check.overlap import describe_shared_documents, find_overlap


def described(ours: Any, theirs: Any, *, shift: int = 0) -> str | None:
    return describe_shared_documents(
        ours.stores, theirs.stores, tokenizer=ByteTokenizer(), shift=shift
    )


def overlap_of(job: list[str], *more: str) -> str | None:
    return find_overlap(resolve_model(load_config([*job, *more])))


def test_the_validation_of_a_job(tmp_path: Path) -> None:
    texts = [f"{i} {i + 1} {i * i}" for i in range(15)]
    path = write_lines(tmp_path / "all.jsonl", [{"text": text} for text in texts])
    job = [*jobs.write_job(tmp_path), "--training.seq_len=32", "--validation.enable"]
    job += ["--training.dataset=files", f"--training.dataset_path={path}"]
    assert overlap_of(job, f"--validation.dataset_path={path}")
    # a copy of some of its lines under another name
    values = [{"text": f"its own {text}"} for text in texts]
    own = write_lines(tmp_path / "own.jsonl", values)
    copy = write_lines(tmp_path / "copy.jsonl", [*({"text": text} for text in texts[:3]), *values])
    documents = overlap_of(job, f"--validation.dataset_path={copy}")
    assert documents is not None
    assert documents.startswith("3 of 18 ")
    (tmp_path / "hard.jsonl").hardlink_to(path)
    (tmp_path / "soft.jsonl").symlink_to(path)
    for name in ("hard", "soft"):
        other = str(tmp_path / f"{name}.jsonl")
        files = overlap_of(job, f'--validation.dataset_path=["{own}", "{other}"]')
        assert files == f"validation reads training files, such as {other}"
    assert overlap_of(job, f"--validation.dataset_path={own}") is None
    for kind in ("synthetic_masked", "synthetic_examples"):
        job = [*jobs.write_job(tmp_path, name=kind), f"--training.dataset={kind}"]
        assert overlap_of(job, "--validation.enable", "--training.seq_len=128") is None


def test_documents_that_both_hold(tmp_path: Path) -> None:
    """In files of other names, one of them a store without end tokens and of another type."""
    mine = TEXTS[:10] + TEXTS[90:100]
    ours = build(job_of(tmp_path / "cache", [write(tmp_path / "held.jsonl", mine)]))
    write_by_hand(tmp_path / "s", [[[*text.encode()]] for text in TEXTS[95:150]], code=4)
    paths = [write(tmp_path / "train.jsonl", TEXTS[20:90]), str(tmp_path / "s")]
    found = described(ours, build(job_of(tmp_path / "cache", paths)))
    assert found is not None
    assert found.startswith("5 of 20 ")
    assert found.endswith(f" document 16 ({TEXTS[95][:40]!r})")
    assert described(ours, build(job_of(tmp_path / "cache", paths[:1]))) is None


def test_documents_of_the_same_ends_are_told_apart_by_their_lengths(tmp_path: Path) -> None:
    ends = "begin " * 100, " end" * 150
    ours, theirs = (
        build(job_of(tmp_path / "cache", [write(tmp_path / f"{n}.jsonl", [("x" * n).join(ends)])]))
        for n in (50, 51)
    )
    assert described(ours, theirs) is None
    assert described(ours, ours) is not None


def test_examples_that_both_hold(tmp_path: Path) -> None:
    values = [{"prompt": f"question {i}", "completion": f"{i}"} for i in range(30)]
    ours, theirs = (
        examples_of(tmp_path / "cache", write_lines(tmp_path / f"{name}.jsonl", part))
        for name, part in (("ours", values[:10]), ("theirs", values[9:]))
    )
    found = described(ours, theirs, shift=1)
    assert found is not None
    assert found.startswith("1 of 10 ")
    assert found.endswith(" document 10 ('question 99')")


def test_the_work_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few documents of many, spread over all of them, and few tokens of each."""
    monkeypatch.setattr(overlap, "NUM_DOCUMENTS", 8)
    monkeypatch.setattr(overlap, "NUM_TOKENS", 3)
    read: list[tuple[int, int]] = []
    correct = overlap.content_number
    monkeypatch.setattr(
        overlap, "content_number", lambda tokens: read.append(tokens.tolist()) or correct(tokens)
    )
    for name, count in (("a", 40), ("b", 60)):
        rows = [[[i, *range(1000, 2000), END]] for i in range(count)]
        write_by_hand(tmp_path / name, rows, code=4)
    stores = [TokenStore(tmp_path / name) for name in "ab"]
    found = describe_shared_documents(stores, stores[1:], tokenizer=ByteTokenizer(), shift=0)
    assert [tokens[0] for tokens in read] == [
        *(i * 60 // 8 for i in range(8)),
        *(i * 100 // 8 if i * 100 // 8 < 40 else i * 100 // 8 - 40 for i in range(8)),
    ]
    assert {len(tokens) for tokens in read} == {6}
    assert found is not None
    assert " of 8 " in found


def test_documents_without_tokens_are_nobodys(tmp_path: Path) -> None:
    for name, token in (("a", 1), ("b", 2)):
        write_by_hand(tmp_path / name, [[[]], [[END]], [[token] * 30], []], code=8)
    stores = [[TokenStore(tmp_path / name)] for name in "ab"]
    assert describe_shared_documents(*stores, tokenizer=ByteTokenizer(), shift=0) is None
    np.testing.assert_equal(stores[0][0].document(3), [])
