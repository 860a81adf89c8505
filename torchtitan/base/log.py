"""Logging for many processes: one readable console, and nothing lost.

A job of a thousand ranks says everything a thousand times. Launchers can hide the output of local
ranks (`torchrun --local-ranks-filter`), but the same local rank exists on every node, so no setting
there shows "global rank 0 alone", and what is hidden is gone. Here each process filters itself by
its global rank: the picked ranks write to the console, and every rank writes its whole log to a
file. Python warnings and the warnings of other libraries take the same way, so that a picked rank
is all one sees.

Modules log through `logging.getLogger(__name__)`; only `main()` calls `init_logging`.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

from torchtitan.base.errors import ConfigError

Style = Literal["dim", "red", "green", "yellow", "blue", "magenta", "cyan"]

_CODES: Mapping[Style, int] = {
    "dim": 2,
    "red": 31,
    "green": 32,
    "yellow": 33,
    "blue": 34,
    "magenta": 35,
    "cyan": 36,
}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_TIME = "%H:%M:%S"
_HANDLER_PREFIX = "torchtitan."


def begin_process(argv: Sequence[str], *, num_ranks: str | None, are_here: bool) -> None:
    """Do what cannot wait until torch is imported, which takes seconds.

    Say on the console that `num_ranks`, or "auto", are starting (None: another process says it),
    and let Ctrl-C end the import without a traceback. `are_here`: all of them on this machine.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.stderr is None:  # started with 2>&-
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for good
    if num_ranks is None or not {"-h", "--help"}.isdisjoint(argv):
        return
    file = find_option(argv, "--job.config_file")
    ranks = amount(int(num_ranks), "rank") if num_ranks.isdecimal() else "ranks"
    where = " on this machine" if are_here else ""
    sys.stderr.write(
        f"{time.strftime(_TIME)} Starting {ranks}{where}{f': {file}' if file else ''} "
        "(importing PyTorch takes a few seconds)\n"
    )
    sys.stderr.flush()


def find_option(argv: Sequence[str], *names: str) -> str | None:
    """Return the last value that a command line gives to an option, as "--x 1" or "--x=1"."""
    value = None
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, equals, given = word.partition("=")
        if name in names:
            value = given if equals else following
    return value


def init_logging(
    *, rank: int, world_size: int, log_rank: str | None, folder: Path | None, color: bool
) -> None:
    """Send this process's log to the console, if its rank is picked, and to its file.

    `log_rank` lists global ranks as in `shown_ranks` (None or "": rank 0). The file is
    `folder/logs/rank_N.log`, appended to when a run is resumed; None writes no file. Call again at
    will: the earlier set-up is replaced.

    Raises ConfigError for a `log_rank` that names no ranks of this job and for a folder that cannot
    be written.
    """
    shown = shown_ranks(log_rank or "0", world_size=world_size)
    handlers: list[logging.Handler] = []
    if rank in shown:
        handlers.append(_console_handler(rank=rank, shown=shown, color=color))
    if folder is not None:
        handlers.append(_file_handler(folder / "logs" / f"rank_{rank}.log"))

    reset_logging()
    # without any handler Python would print warnings by itself
    for handler in handlers or [logging.NullHandler()]:
        handler.name = f"{_HANDLER_PREFIX}{type(handler).__name__}"
        logging.getLogger().addHandler(handler)
    logging.getLogger("torchtitan").setLevel(logging.INFO)
    logging.captureWarnings(True)
    if not os.environ.get("TORCH_LOGS"):
        _adopt_library_loggers()


def note_in_file(message: str) -> None:
    """Write to this process's log file alone: for what the console is told in another way."""
    record = logging.makeLogRecord(
        {"name": __name__, "levelno": logging.ERROR, "levelname": "ERROR", "msg": message}
    )
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


def reset_logging() -> None:
    """Take away what `init_logging` installed; files are closed."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        if (handler.name or "").startswith(_HANDLER_PREFIX):
            root.removeHandler(handler)
            handler.close()
    logging.captureWarnings(False)


@contextmanager
def keep_logging() -> Iterator[None]:
    """Undo on exit what `init_logging` installed inside."""
    level = logging.getLogger("torchtitan").level
    try:
        yield
    finally:
        reset_logging()
        logging.getLogger("torchtitan").setLevel(level)


def shown_ranks(spec: str, *, world_size: int) -> frozenset[int]:
    """Return the global ranks that `spec` picks: "all", or a list such as "0" or "0,7".

    Raises ConfigError when it is neither, or names a rank that the job does not have.
    """
    if spec.strip() == "all":
        return frozenset(range(world_size))
    words = [word.strip() for word in spec.split(",")]
    if all(word.isdecimal() and len(word) < 10 and int(word) < world_size for word in words):
        return frozenset(map(int, words))
    known = "0, since this job has only rank 0"
    if world_size > 1:
        known = f"global ranks between 0 and {world_size - 1}, separated by commas"
    raise ConfigError(f"LOG_RANK must be 'all' or {known}, got {spec!r}; try LOG_RANK=0")


def is_terminal(stream: TextIO) -> bool:
    """Tell whether a person watches `stream` through something that can move the cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def amount(number: int, noun: str) -> str:
    """Return "1 batch" or "2 batches"."""
    ending = "es" if noun.endswith("tch") else "s"
    return f"{number} {noun}{'' if number == 1 else ending}"


def erase_line(stream: TextIO) -> str:
    """Return what clears the line of a terminal where another rank's bar may stand."""
    return "\r\x1b[2K" if is_terminal(stream) else ""


def use_color(stream: TextIO, *, disabled: bool) -> bool:
    """Tell whether to write colours to `stream`: a terminal, and neither NO_COLOR nor `disabled`.

    NO_COLOR counts when it is set to anything but "" (https://no-color.org).
    """
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and not disabled


def paint(text: str, style: Style, *, color: bool) -> str:
    """Return `text` in the style for terminals, or as it is when `color` is False."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if color else text


class _ConsoleHandler(logging.StreamHandler):
    """Write to whatever `sys.stderr` is now: a progress bar stands in for it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


class _ConsoleFormatter(logging.Formatter):
    """One short line: time, rank if several are shown, level and origin unless all is well."""

    def __init__(self, *, rank_label: str, before: str, color: bool) -> None:
        super().__init__(datefmt=_TIME)
        self.rank_label = rank_label
        self.before = before
        self.color = color

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record).rstrip()
        if not self.color:
            text = _ESCAPES.sub("", text)
        if record.levelno >= logging.WARNING:
            style: Style = "yellow" if record.levelno < logging.ERROR else "red"
            text = f"{paint(record.levelname, style, color=self.color)} {text}"
        time = paint(self.formatTime(record, self.datefmt), "dim", color=self.color)
        return f"{self.before}{time} {self.rank_label}{text}"


class _FileFormatter(logging.Formatter):
    """Everything there is to know of a record, in plain text."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return _ESCAPES.sub("", super().format(record).rstrip())


def _console_handler(*, rank: int, shown: frozenset[int], color: bool) -> logging.Handler:
    handler = _ConsoleHandler(sys.stderr)
    # The first picked rank may draw a progress bar. The others are other processes that know
    # nothing of it, so they clear the line they find themselves on; the bar redraws itself below.
    handler.setFormatter(
        _ConsoleFormatter(
            rank_label=f"[rank {rank}] " if len(shown) > 1 else "",
            before=erase_line(sys.stderr) if rank != min(shown) else "",
            color=color,
        )
    )
    return handler


class _FileHandler(logging.FileHandler):
    """Say once that lines are lost where the disk takes no more: no run ends over its log."""

    is_lost = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Note a line that could not be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.is_lost:
            self.is_lost = True
            sys.stderr.write(f"{self.baseFilename} lacks lines from now on: {error.strerror}\n")

    def close(self) -> None:
        """Close the file; what it could not take was told of."""
        try:
            super().close()
        except OSError:
            if not self.is_lost:
                raise


def _file_handler(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _FileHandler(path, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"job.dump_folder must be a folder this job can write to, got {path.parent.parent} "
            f"({error.strerror}: {error.filename}); name another folder"
        ) from error
    handler.setFormatter(_FileFormatter())
    return handler


def _adopt_library_loggers() -> None:
    """Send what imported libraries would write to stderr themselves through our handlers instead.

    torch gives dozens of its loggers a handler of their own, on every rank. TORCH_LOGS asks for
    exactly those, so with it they stay.
    """
    known = logging.Logger.manager.loggerDict.values()
    for logger in (each for each in known if isinstance(each, logging.Logger)):
        for handler in list(logger.handlers):
            # by exact name: another subclass (a file, a trace) does something of its own.
            # _StderrHandler is torch's from 2.15 on
            is_for_console = type(handler).__name__ in ("StreamHandler", "_StderrHandler")
            if is_for_console and getattr(handler, "stream", None) in _standard_streams():
                logger.removeHandler(handler)
                logger.propagate = True


def _standard_streams() -> tuple[TextIO | None, ...]:
    return (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
