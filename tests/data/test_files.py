"""Which files are taken, and what is said of those that are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.naming import naming
from torchtitan.base.errors import DataError
from torchtitan.data.files import find_all, find_files


def test_find_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("b.txt", "a.txt", "c.md", "s.bin", "s.idx", "[x].txt", "deep/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()

    def names(pattern: str) -> list[str]:
        return [p.relative_to(tmp_path).as_posix() for p in find_files(str(tmp_path / pattern))]

    assert names("*.txt") == ["[x].txt", "a.txt", "b.txt"]
    assert "1 of 4 files" in caplog.text
    assert names("**/*.txt") == ["[x].txt", "a.txt", "b.txt", "deep/d.txt"]
    assert names("[x].txt") == ["[x].txt"]
    # a store is one thing, by any of its names
    for store in ("s", "s.bin", "s.idx", "s.*"):
        assert names(store) == ["s.idx"]
    wrong = ("*.no", "e*.txt", "dee*", "x" * 5000)
    for pattern in (*(str(tmp_path / name) for name in wrong), "~nobody-such/a.txt", "hf://a/b"):
        with pytest.raises(DataError, match=r"^dataset_path: "):
            find_files(pattern)


def test_a_folder_is_all_files_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.jsonl.gz", "b/[1]/b.jsonl.gz", "d.txt", "s.bin", "s.idx", ".hidden/no.xls"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.txt").touch()
    names = [file.relative_to(tmp_path).as_posix() for file in find_files(str(tmp_path))]
    assert names == ["a.jsonl.gz", "b/[1]/b.jsonl.gz", "d.txt", "s.idx"]
    assert "1 of 6 files" in caplog.text
    assert find_files(str(tmp_path / "b/[1]")) == [tmp_path / "b/[1]/b.jsonl.gz"]
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match=naming("dataset_path", tmp_path / "none")):
        find_files(str(tmp_path / "none"))


def test_entries_keep_their_order_and_local_ones_are_looked_for_first(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("text")
    entries = [f"file://{tmp_path}/b.txt", str(tmp_path / "a.txt")]
    found = find_all(entries, cache=str(tmp_path / "cache"))
    assert [[file.name for file in files] for files in found] == [["b.txt"], ["a.txt"]]
    with pytest.raises(DataError, match=r"none\.txt"):
        find_all(["nowhere://bucket/a.txt", str(tmp_path / "none.txt")], cache="unused")
