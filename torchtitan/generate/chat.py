"""A chat in the terminal: answers appear as they are drawn, and the conversation is remembered.

Each question is asked with all that was said before it, which the model reads anew in one pass: so
every answer is the one that the same messages give anywhere else, and a template may write earlier
messages differently once later ones follow. Keeping keys and values between questions would save
that pass, and need attention from several tokens to those of a cache.

Ctrl-C ends an answer, not the chat. It is noted, and read between two tokens, so that nothing is
left half done.
"""

from __future__ import annotations

import re
import signal
import threading
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchtitan.base.errors import DataError, did_you_mean
from torchtitan.data.text import any_of
from torchtitan.finetune.chat import Message
from torchtitan.generate.generator import Generator
from torchtitan.generate.sampling import Sampling
from torchtitan.generate.text import check_chats, encode_chats, stream_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

COMMANDS = {
    "/reset": "forget what was said; the system message stays",
    "/system": "TEXT: set the system message; without a text remove it",
    "/help": "show this",
    "/quit": "leave, as Ctrl-D does",
}
HELP = "\n".join(f"{name} {meaning}" for name, meaning in COMMANDS.items())


class Chat:
    """A conversation that grows.

    Raises ConfigError if the model has no chat template.
    """

    def __init__(
        self, generator: Generator, *, system: str | None = None, **sampling: Unpack[Sampling]
    ) -> None:
        check_chats(generator)
        self._generator, self._sampling = generator, sampling
        self._special = re.compile(any_of(generator.tokenizer.special_tokens))
        self.system = system
        self.said: list[Message] = []
        self.num_tokens = 0
        """Read to answer the last question."""

    def ask(self, question: str) -> abc.Generator[str, None, None]:
        """Yield the answer in pieces, and remember it with its question, also where it is given up.

        What the model drew of special tokens is left out of what is remembered: no message may
        spell one. Raises DataError for a question that cannot be asked, which is forgotten.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        said: list[Message] = [*self.said, {"role": "user", "content": question}]
        [ids], stop_ids = encode_chats(self._generator, [[*system, *said]])
        self.num_tokens = len(ids)
        answer = ""
        try:
            for piece in stream_tokens(self._generator, ids, stop_ids, **self._sampling):
                answer += piece
                yield piece
        finally:
            # again: what is taken out may leave another name behind
            while (plain := self._special.sub("", answer)) != answer:
                answer = plain
            self.said = [*said, {"role": "assistant", "content": answer}]

    @property
    def warning(self) -> str | None:
        """What to say of a conversation that is longer than the model is made for."""
        context = self._generator.context
        if context is None or self.num_tokens <= context:
            return None
        return (
            f"(the conversation has {self.num_tokens} tokens, more than the {context} that the "
            f"model is made for, and answers may get worse; /reset begins a new one)"
        )

    def command(self, line: str) -> str | None:
        """Do what a line that begins with a slash asks for; return what to show, None: leave.

        Raises DataError for one that is no command.
        """
        name, _, text = line.partition(" ")
        if name == "/quit":
            return None
        if name == "/help":
            return HELP
        if name == "/reset":
            self.said = []
            return "(forgotten)"
        if name == "/system":
            self.system = text.strip() or None
            return "(no system message)" if self.system is None else "(system message set)"
        raise DataError(
            f"a line with a slash must be one of {', '.join(COMMANDS)}, got {name!r:.60}"
            f"{did_you_mean(name, COMMANDS)}; put a space before it to say it to the model"
        )


def talk(
    chat: Chat,
    *,
    read: Callable[[], str],
    write: Callable[[str], None],
    tell: Callable[[str], None],
    stops_at_mistakes: bool,
) -> int:
    """Answer line by line until `read` raises EOFError or /quit; return the number of lines.

    Answers go to `write` in pieces, all else to `tell`. Raises DataError for a line that is a
    mistake where `stops_at_mistakes`, else it is told, and the chat goes on.
    """
    num_lines = 0
    while True:
        try:
            line = read().rstrip("\r\n")
        except EOFError:
            return num_lines
        num_lines += 1
        try:
            if line.startswith("/"):
                if (reply := chat.command(line)) is None:
                    return num_lines
                tell(reply)
            elif line.strip():
                _answer(chat, line.strip(), write=write, tell=tell)
        except DataError as error:
            if stops_at_mistakes:
                raise
            tell(f"error: {error}")


def _answer(
    chat: Chat, question: str, *, write: Callable[[str], None], tell: Callable[[str], None]
) -> None:
    pieces = chat.ask(question)
    with _noted_interrupts() as interrupt:
        for piece in pieces:
            write(piece)
            if interrupt.is_set():
                break
    pieces.close()
    write("\n")
    if interrupt.is_set():
        tell("(stopped)")
    if chat.warning:
        tell(chat.warning)


@contextmanager
def _noted_interrupts() -> Iterator[threading.Event]:
    """Note Ctrl-C instead of raising an exception wherever it comes."""
    interrupt = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupt.set())
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
