from __future__ import annotations

import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.base.log import (
    init_logging,
    paint,
    plural,
    reset_logging,
    shown_ranks,
    use_color,
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


@pytest.mark.parametrize(
    "spec", ["16", "-1", "0,,7", "0;7", "zero", "0.5", "ALL of them", "²", "9" * 5000]
)
def test_malformed_ranks_name_rule_value_and_remedy(spec: str) -> None:
    with pytest.raises(ConfigError) as raised:
        shown_ranks(spec, world_size=16)
    message = str(raised.value)
    assert naming(0, 15).match(message)
    assert repr(spec) in message
    assert "LOG_RANK=0" in message


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


def test_a_rank_without_console_and_file_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    _start(1, folder=None)
    logger.warning("nobody hears this")
    assert capsys.readouterr() == ("", "")


def test_again_replaces_and_appends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for start in range(3):
        _start(0, folder=tmp_path)
        logger.info("start %d", start)
    reset_logging()
    assert capsys.readouterr().err.count("start 2") == 1
    text = (tmp_path / "logs" / "rank_0.log").read_text()
    assert [line[-7:] for line in text.splitlines()] == ["start 0", "start 1", "start 2"]


def test_colours_reach_the_console_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for color in (True, False):
        _start(0, folder=tmp_path / str(color), color=color)
        logger.warning(paint("red text", "red", color=True))
        console = capsys.readouterr().err
        assert ("\x1b[31mred text\x1b[0m" in console) == color
        assert ("\x1b" in console) == color
        assert "red text" in console
        text = (tmp_path / str(color) / "logs" / "rank_0.log").read_text()
        assert "some.module: red text\n" in text


def test_use_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal, os.fdopen(leader):
        assert use_color(terminal, disabled=False)
        assert not use_color(terminal, disabled=True)
        assert not use_color(io.StringIO(), disabled=False)
        monkeypatch.setenv("NO_COLOR", "")  # empty: as if it were not set (no-color.org)
        assert use_color(terminal, disabled=False)
        monkeypatch.setenv("NO_COLOR", "0")
        assert not use_color(terminal, disabled=False)
        monkeypatch.delenv("NO_COLOR")
        monkeypatch.setenv("TERM", "dumb")
        assert not use_color(terminal, disabled=False)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=naming("job.dump_folder", tmp_path / "file")):
        _start(0, folder=tmp_path / "file")


@pytest.mark.slow
def test_handlers_that_libraries_installed_are_silenced_unless_torch_logs_asks(
    warm_python: Path,
) -> None:
    """torch gives its loggers handlers on stderr at import, on every rank."""
    code = (
        "import logging\n"
        "import torch.distributed\n"
        "from torchtitan.base.log import init_logging\n"
        "init_logging(rank=1, world_size=2, log_rank=None, folder=None, color=False)\n"
        "logging.getLogger('torch.distributed').warning('noise of rank 1')\n"
    )
    without = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    for env, heard in ((without, False), ({**without, "TORCH_LOGS": "+fsdp"}, True)):
        done = subprocess.run(
            [warm_python, "-c", code],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert ("noise of rank 1" in done.stderr) == heard


def test_importing_has_no_effect() -> None:
    code = (
        "import logging, sys\n"
        "import torchtitan.base.log\n"
        "assert not logging.getLogger().handlers\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_amounts() -> None:
    assert [plural(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [plural(n, "batch") for n in (1, 2)] == ["1 batch", "2 batches"]
    assert plural(2, "epoch") == "2 epochs"
