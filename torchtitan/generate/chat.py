"""A chat in the terminal that streams its answers and remembers the conversation.

Each question is sent with all earlier messages, which the model reads again in one pass. So an
answer equals the answer to the same messages elsewhere, and a template may render earlier
messages differently once later ones follow. Keeping the KV cache between questions would save the
pass, but needs attention from several new tokens to a cache.

Ctrl-C ends an answer, not the chat. It is checked between two tokens, so that no state is left
half changed.
"""

from __future__ import annotations

import re
import signal
import threading
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchtitan.base.errors import DataError
from torchtitan.data.text import any_of
from torchtitan.finetune.chat import Message
from torchtitan.generate.generator import Generator
from torchtitan.generate.sampling import Sampling
from torchtitan.generate.text import encode_chats, get_template, stream_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

HELP = """\
/reset forget the conversation, except the system message
/system TEXT: set the system message; without TEXT, remove it
/help show the commands
/quit leave, as Ctrl-D does"""


class Chat:
    """A conversation with a model. Raises ConfigError if the model has no chat template."""

    def __init__(
        self, generator: Generator, *, system: str | None = None, **sampling: Unpack[Sampling]
    ) -> None:
        get_template(generator)
        self._generator, self._sampling = generator, sampling
        self._special = re.compile(any_of(generator.tokenizer.special_tokens))
        self.system = system
        self.messages: list[Message] = []
        """The conversation without the system message."""

    def ask(self, question: str) -> abc.Generator[str, None, None]:
        """Yield the answer in pieces; remember it with its question, also if it is closed early.

        Special tokens are removed from the remembered answer, as no message may contain one. Raises
        DataError if the question is invalid. It is not remembered.
        """
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages: list[Message] = [*self.messages, {"role": "user", "content": question}]
        [ids], stop_ids = encode_chats(self._generator, [[*system, *messages]])
        answer = ""
        try:
            for piece in stream_tokens(self._generator, ids, stop_ids, **self._sampling):
                answer += piece
                yield piece
        finally:
            # repeated: removing a name may create another one
            while (plain := self._special.sub("", answer)) != answer:
                answer = plain
            self.messages = [*messages, {"role": "assistant", "content": answer}]

    def run_command(self, line: str) -> str | None:
        """Run a line that starts with a slash; return the text to show, None to leave; raise
        DataError if the command is unknown."""
        name, _, text = line.partition(" ")
        if name == "/quit":
            return None
        if name == "/help":
            return HELP
        if name == "/reset":
            self.messages = []
            return "(conversation forgotten)"
        if name == "/system":
            self.system = text.strip() or None
            return "(system message removed)" if self.system is None else "(system message set)"
        raise DataError(f"{name!r:.60} is no command; /help lists them, a space before it sends it")


def talk(
    chat: Chat,
    *,
    read: Callable[[], str],
    write: Callable[[str], None],
    notify: Callable[[str], None],
    stops_at_errors: bool,
) -> int:
    """Answer line by line until `read` raises EOFError, or /quit; return the number of lines.

    `write` gets pieces of an answer, `notify` any other line. `stops_at_errors` raises errors of a
    line instead of showing them. Raises DataError if a line is invalid, and `stops_at_errors`.
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
                if (reply := chat.run_command(line)) is None:
                    return num_lines
                notify(reply)
            elif line.strip():
                _answer(chat, line.strip(), write=write, notify=notify)
        except DataError as error:
            if stops_at_errors:
                raise
            notify(f"error: {error}")


def _answer(
    chat: Chat, question: str, *, write: Callable[[str], None], notify: Callable[[str], None]
) -> None:
    pieces = chat.ask(question)
    with _record_interrupts() as interrupted:
        for piece in pieces:
            write(piece)
            if interrupted.is_set():
                break
    pieces.close()
    write("\n")
    if interrupted.is_set():
        notify("(stopped)")


@contextmanager
def _record_interrupts() -> Iterator[threading.Event]:
    """Record Ctrl-C in an event instead of raising KeyboardInterrupt."""
    interrupted = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: interrupted.set())
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
