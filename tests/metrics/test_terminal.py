"""What a terminal shows in the end: log lines and bar, written to a pty, read by an emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

WIDTH = 120

RUN = """
import logging, os, sys, time
from pathlib import Path
from torchtitan.base.log import init_logging, shown_ranks, use_color
from torchtitan.metrics.console import (
    ConsoleSink,
    ProgressBar,
    log_summary,
    shows_bar,
)

rank, log_rank, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
color = use_color(sys.stderr, disabled="plain" in sys.argv)
init_logging(rank=rank, world_size=4, log_rank=log_rank, folder=folder, color=color)
show = shows_bar(rank, console_ranks=shown_ranks(log_rank, world_size=4))
sink = ConsoleSink(last_step=6, color=color)
with ProgressBar(done_steps=2, total_steps=6, show=show, color=color) as bar:
    for step in range(3, 7):
        sink.write({"step": step, "loss": 8.0 / step})
        bar.advance(step)
        time.sleep(0.15)
    with bar.status("saving"):
        pass  # it is drawn at once, and again when it is over
    logging.getLogger("torchtitan.x").warning("last words of rank %d", rank)
    if "freeze" in sys.argv:
        (folder / f"done_{rank}").touch()
        while not all((folder / f"done_{other}").exists() for other in log_rank.split(",")):
            time.sleep(0.05)
        time.sleep(1.5)  # the bar is drawn once more, twice a second
        os._exit(0)  # and stays on the screen
if show or rank == 0 and "summary" in sys.argv:
    log_summary({"steps": "6", "time": "1:02:05", "metrics": "out/[x]/metrics.jsonl"})
"""


def _screen(text: str) -> list[str]:
    """Return the lines a terminal shows after `text`: printed characters, \\r, \\n, CSI codes."""
    lines, row, column = [""], 0, 0
    for code, char in re.findall(r"\x1b\[([0-9;?]*[A-Za-z])|(.)", text, flags=re.DOTALL):
        if code.endswith("A"):
            row -= int(code[:-1] or 1)
        elif code == "2K":
            lines[row] = ""
        elif char == "\r":
            column = 0
        elif char == "\n":
            row += 1
            lines.extend([""] * (row + 1 - len(lines)))
        elif char:
            lines[row] = lines[row].ljust(column)[:column] + char + lines[row][column + 1 :]
            column += 1
        else:
            assert re.fullmatch(r"[0-9;]*m|\?25[lh]", code), f"code {code!r}: teach the emulator"
    return [line.rstrip() for line in lines]


def _in_terminal(
    commands: list[list[str]], *, width: int = WIDTH, code: str = RUN, **env: str
) -> str:
    """Run processes on one new terminal; return all bytes that reached it."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "FORCE_COLOR")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=follower,
            stderr=follower,
            env={**clean, "TERM": "xterm-256color", **env},
        )
        for arguments in commands
    ]
    os.close(follower)
    received = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # EIO: how Linux says that nobody has the terminal open any more
            break
        if not chunk:
            break
        received += chunk
    os.close(leader)
    assert [process.wait(timeout=60) for process in processes] == [0] * len(processes)
    return received.decode()


def _log_lines(screen: list[str]) -> list[str]:
    return [line for line in screen if re.match(r"\d\d:\d\d:\d\d ", line)]


@pytest.mark.slow
def test_bar_stays_below_whole_log_lines(tmp_path: Path) -> None:
    written = _in_terminal([["0", "0", str(tmp_path), "freeze"]])
    screen = _screen(written)
    lines = _log_lines(screen)
    assert [re.sub(r"^\S+ ", "", line) for line in lines] == [
        *(f"step: {step:>6d}/6  loss: {8 / step:8.5f}" for step in range(3, 7)),
        "WARNING last words of rank 0",
    ]
    assert screen[: len(lines)] == lines
    (bar,) = [line for line in screen[len(lines) :] if line]
    assert re.match(r"training .* 6/6 left 0:00:00", bar)
    assert "2/6" in written  # it began behind what an earlier start had done
    assert "\x1b[32mloss:  2.66667\x1b[0m" in written


SUMMARY = ["  steps    6", "  time     1:02:05", "  metrics  out/[x]/metrics.jsonl"]


@pytest.mark.slow
def test_lines_of_other_picked_ranks_do_not_run_into_the_bar(tmp_path: Path) -> None:
    commands = [[rank, "1,3", str(tmp_path), "freeze"] for rank in "0123"]
    screen = _screen(_in_terminal(commands))
    lines = _log_lines(screen)
    for rank in (1, 3):
        said = [line.split(f"[rank {rank}] ")[1] for line in lines if f"[rank {rank}]" in line]
        assert said == [
            *(f"step: {step:>6d}/6  loss: {8 / step:8.5f}" for step in range(3, 7)),
            f"WARNING last words of rank {rank}",
        ]
    assert len(lines) == 10
    # of rank 0 and 2 nothing, of the bar nothing but itself
    assert len([line for line in screen if line and line not in lines]) == 1


def test_off_a_terminal_there_are_plain_lines_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, "0", "0", str(tmp_path), "summary"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert "\x1b" not in done.stderr
    assert "\r" not in done.stderr
    lines = [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in done.stderr.splitlines()]
    assert lines[4:] == [
        "WARNING last words of rank 0",
        "training finished",
        *SUMMARY,
    ]
