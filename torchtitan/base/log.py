"""Logging for many processes: a readable console and a complete log file per rank.

If every rank logged to the console, a job of a thousand ranks would print each line a thousand
times. Launchers filter by local rank (`torchrun --local-ranks-filter`), which exists on every node,
and what they hide is lost. So each process filters by its global rank: the ranks in LOG_RANK log to
the console, and every rank logs to a file, Python warnings and torch's log records included.

Modules log through `logging.getLogger(__name__)`. Only `main()` calls `init_logging`.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Literal, TextIO

from torchtitan.base.errors import ConfigError

Style = Literal["dim", "red", "green", "yellow", "blue", "magenta", "cyan"]
_CODES: Mapping[Style, str] = {
    **{"dim": "2", "red": "31", "green": "32", "yellow": "33"},
    **{"blue": "34", "magenta": "35", "cyan": "36"},
}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HANDLER_PREFIX = "torchtitan."
SECONDS_TO_READ = 1.0
"""Time that the reader of stderr has before lines are left out. The log file has all of them."""
CHARACTERS = 1000
"""Written at once: up to 4 bytes each, for which a pipe that can be written to has room."""


def init_logging(
    *, rank: int, world_size: int, log_rank: str | None, folder: Path | None, color: bool
) -> None:
    """Log to the console if this rank is shown, and to this rank's file. Replaces earlier calls.

    `log_rank` is read by `shown_ranks`; without it rank 0 is shown. The file is
    `folder/logs/rank_N.log`, none without a folder. Raises ConfigError if `log_rank` is invalid, or
    the file cannot be written.
    """
    console_ranks = shown_ranks(log_rank or "0", world_size=world_size)
    handlers: list[logging.Handler] = []
    if rank in console_ranks:
        handlers.append(_ConsoleHandler(rank=rank, console_ranks=console_ranks, color=color))
    if folder is not None:
        handlers.append(_open_file(folder / "logs" / f"rank_{rank}.log"))
    reset_logging()
    # without any handler Python prints warnings itself
    for handler in handlers or [logging.NullHandler()]:
        handler.name = f"{_HANDLER_PREFIX}{type(handler).__name__}"
        logging.getLogger().addHandler(handler)
    logging.getLogger("torchtitan").setLevel(logging.INFO)
    logging.captureWarnings(True)
    if not os.environ.get("TORCH_LOGS"):  # which asks for torch's own handlers, on every rank
        for name in list(logging.Logger.manager.loggerDict):
            if f"{name}.".startswith("torch.") and name != "torch.__trace":  # TORCH_TRACE's file
                logger = logging.getLogger(name)
                logger.handlers = [h for h in logger.handlers if isinstance(h, logging.FileHandler)]
                logger.propagate = True


def replace_closed_streams() -> None:
    """Write to nowhere what is printed to a closed stream (`>&-`), which Python has as None."""
    for number, name in enumerate(("stdout", "stderr"), start=1):
        if getattr(sys, name) is None:  # or the next file would get its descriptor
            descriptor = os.open(os.devnull, os.O_WRONLY)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            stream = open(number, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
            setattr(sys, name, stream)


def can_write(stream: TextIO, *, timeout: float) -> bool:
    """Return whether a short text can be written without blocking, within some seconds."""
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError, ValueError):  # a stream in memory, or a closed one
        return True
    return bool(select.select([], [descriptor], [], timeout)[1])


@contextmanager
def showing_time(*, every: float = 20.0) -> Iterator[None]:
    """Write the elapsed time to stderr every some seconds: not all work has steps to count."""
    is_done, start = Event(), time.monotonic()

    def show() -> None:
        while not is_done.wait(every):
            sys.stderr.write(f"still working, {time.monotonic() - start:.0f} s\n")

    Thread(target=show, daemon=True).start()
    try:
        yield
    finally:
        is_done.set()


def note_in_file(message: str, level: str = "ERROR") -> None:
    """Log to this process's file only, such as an error that the console shows in another way."""
    facts = {"name": __name__, "levelno": getattr(logging, level), "levelname": level}
    record = logging.makeLogRecord({**facts, "msg": message})
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def reset_logging() -> None:
    """Remove the handlers that `init_logging` installed and close the file."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if (handler.name or "").startswith(_HANDLER_PREFIX):
            root.removeHandler(handler)
            with suppress(OSError):  # a full disk, which the handler has reported
                handler.close()
    logging.captureWarnings(False)


@contextmanager
def keep_logging() -> Iterator[None]:
    """Remove on exit what `init_logging` installed inside."""
    level = logging.getLogger("torchtitan").level
    try:
        yield
    finally:
        reset_logging()
        logging.getLogger("torchtitan").setLevel(level)


def shown_ranks(spec: str, *, world_size: int) -> frozenset[int]:
    """Return the global ranks in `spec`: "all", or a list such as "0" or "0,7"; raise ConfigError
    if `spec` is malformed or names a rank that the job does not have."""
    if spec.strip() == "all":
        return frozenset(range(world_size))
    words = [word.strip() for word in spec.split(",")]
    if all(word.isdecimal() and len(word) < 10 and int(word) < world_size for word in words):
        return frozenset(map(int, words))
    raise ConfigError(
        f"LOG_RANK must be 'all' or global ranks between 0 and {world_size - 1}, separated by "
        f"commas, got {spec!r}; try LOG_RANK=0"
    )


def is_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def plural(number: int, noun: str) -> str:
    """Return "1 batch" or "2 batches"."""
    ending = "es" if noun.endswith("tch") else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


def erase_line(stream: TextIO) -> str:
    """Return the code that clears a terminal's line, where another rank's bar may be."""
    return "\r\x1b[2K" if is_terminal(stream) else ""


def use_color(stream: TextIO, *, disabled: bool) -> bool:
    """Return whether to write colors: to a terminal, without NO_COLOR (https://no-color.org) and
    unless `disabled`."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and not disabled


def paint(text: str, style: Style, *, color: bool) -> str:
    """Return `text` in a style for terminals, or unchanged if `color` is False."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if color else text


class _ConsoleHandler(logging.StreamHandler):
    """Write to the current `sys.stderr`, which a progress bar replaces while it is drawn.

    Lines have the time, the rank if several are shown, and the level of warnings and errors.
    """

    def __init__(self, *, rank: int, console_ranks: frozenset[int], color: bool) -> None:
        super().__init__(sys.stderr)
        self._label = f"[rank {rank}] " if len(console_ranks) > 1 else ""
        # the first shown rank may draw a bar; other processes clear its line, and rich redraws it
        self._before = erase_line(sys.stderr) if rank != min(console_ranks) else ""
        self._color = color
        self._patience = SECONDS_TO_READ

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, less what a stalled reader would block."""
        stream, text = sys.stderr, f"{self.format(record)}\n"
        try:
            for start in range(0, len(text), CHARACTERS):
                is_read = can_write(stream, timeout=self._patience)
                self._patience = SECONDS_TO_READ if is_read else 0.0
                if not is_read:
                    return
                stream.write(text[start : start + CHARACTERS])
                stream.flush()
        except Exception:  # noqa: BLE001 - as all of Python's handlers
            self.handleError(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).rstrip()
        text = text if self._color else _ESCAPES.sub("", text)
        if record.levelno >= logging.WARNING:
            style: Style = "yellow" if record.levelno < logging.ERROR else "red"
            text = f"{paint(record.levelname, style, color=self._color)} {text}"
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        return f"{self._before}{paint(clock, 'dim', color=self._color)} {self._label}{text}"


class _PlainFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return _ESCAPES.sub("", super().format(record).rstrip())


def _open_file(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"job.dump_folder must be writable, got {path}: {error}") from error
    handler.setFormatter(_PlainFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler
