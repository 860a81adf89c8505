from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan.base.log import (
    init_logging,
    reset_logging,
    showing_time,
    shown_ranks,
)

logger = logging.getLogger("torchtitan.some.module")


@pytest.fixture(autouse=True)
def _logging_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_LOGS", "+fsdp")  # leaves torch's handlers in this process alone
    root, ours = logging.getLogger(), logging.getLogger("torchtitan")
    handlers, level = list(root.handlers), ours.level
    yield
    reset_logging()
    assert root.handlers == handlers
    ours.setLevel(level)


def _start(rank: int, *, folder: Path | None, log_rank: str | None = None, color=False) -> None:
    init_logging(rank=rank, world_size=16, log_rank=log_rank, folder=folder, color=color)


@pytest.mark.promise("last-stage-loss")
@pytest.mark.parametrize(
    ("spec", "ranks"),
    [("0", {0}), ("0,7", {0, 7}), (" 3 , 5 ", {3, 5}), ("15", {15}), ("all", set(range(16)))],
)
def test_shown_ranks(spec: str, ranks: set[int]) -> None:
    assert shown_ranks(spec, world_size=16) == ranks


@pytest.mark.promise("last-stage-loss")
@pytest.mark.parametrize("log_rank", [None, "", "0", "0,9", "8", "all"])
def test_console_shows_picked_global_ranks_and_files_have_all(
    log_rank: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two nodes of eight: local rank 0 is global rank 0 on one node and 8 on the other."""
    for rank in range(16):
        _start(rank, folder=tmp_path, log_rank=log_rank)
        logger.info("this is rank %d.", rank)
        logger.error("trouble on rank %d.", rank)
    reset_logging()

    console = capsys.readouterr().err
    picked = {None: {0}, "": {0}, "0": {0}, "0,9": {0, 9}, "8": {8}, "all": set(range(16))}
    for rank in range(16):
        shown = rank in picked[log_rank]
        assert (f"this is rank {rank}." in console) == shown
        assert (f"trouble on rank {rank}." in console) == shown
        assert (f"[rank {rank}] " in console) == (shown and len(picked[log_rank]) > 1)
        text = (tmp_path / "logs" / f"rank_{rank}.log").read_text()
        assert f"INFO torchtitan.some.module: this is rank {rank}." in text
        assert f"ERROR torchtitan.some.module: trouble on rank {rank}." in text
        assert text.count("\n") == 2


def test_a_stalled_reader_of_the_console_stops_nothing(tmp_path: Path) -> None:
    """More than a pipe holds, and nobody reads it."""
    code = (
        "import logging, sys; from pathlib import Path; from torchtitan.base import log;"
        "log.SECONDS_TO_READ = 0.01;"
        "log.init_logging(rank=0, world_size=1, log_rank=None, folder=Path(sys.argv[1]),"
        "color=False);"
        "[logging.getLogger('torchtitan.x').info('%d %s', i, 'x' * 5000) for i in range(99)]"
    )
    unread, written = os.pipe()
    try:
        command = [sys.executable, "-c", code, str(tmp_path)]
        subprocess.run(command, stderr=written, check=True, timeout=120)
    finally:
        os.close(unread)
        os.close(written)
    lines = (tmp_path / "logs" / "rank_0.log").read_text().splitlines()
    assert [line.split()[4] for line in lines] == [str(i) for i in range(99)]


def test_warnings_take_the_way_of_the_log(tmp_path: Path) -> None:
    """In processes of their own: pytest catches warnings itself."""
    code = (
        "import logging, sys, warnings\n"
        "from pathlib import Path\n"
        "from torchtitan.base.log import init_logging\n"
        "rank, folder = int(sys.argv[1]), Path(sys.argv[2])\n"
        "init_logging(rank=rank, world_size=2, log_rank=None, folder=folder, color=False)\n"
        "warnings.warn(f'old thing on rank {rank}')\n"
        "logging.getLogger('somelib').warning('lib warns on rank %d', rank)\n"
        "logging.getLogger('somelib').info('lib chats on rank %d', rank)\n"
    )
    consoles = [
        subprocess.run(
            [sys.executable, "-c", code, str(rank), str(tmp_path)],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        for rank in (0, 1)
    ]
    assert re.search(r"^\d\d:\d\d:\d\d WARNING .*old thing on rank 0", consoles[0])
    assert "WARNING lib warns on rank 0" in consoles[0]
    assert "chats" not in consoles[0]
    assert consoles[1] == ""
    text = (tmp_path / "logs" / "rank_1.log").read_text()
    assert "old thing on rank 1" in text
    assert "lib warns on rank 1" in text


def test_long_work_shows_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    shown = ""
    with showing_time(every=0.01):
        while "still working, 0 s" not in shown:
            shown += capsys.readouterr().err
