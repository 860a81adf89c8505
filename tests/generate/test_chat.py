"""Chats that are fed line by line, against the answers to the same messages at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.finetune.chats import CHATML, write_tokenizer
from tests.generate.test_text import random_generator
from torchtitan.generate.chat import Chat, talk
from torchtitan.generate.generator import Generator
from torchtitan.generate.text import answer

SETTINGS = {"max_new_tokens": 12, "temperature": 1.5, "seed": 3}


@pytest.fixture
def generator(tmp_path: Path) -> Generator:
    return random_generator(str(write_tokenizer(tmp_path / "tokenizer", template=CHATML)))


class Fed:
    """A terminal whose lines are known beforehand."""

    def __init__(self, *lines: str) -> None:
        self._lines: Iterator[str] = iter(lines)
        self.pieces: list[str] = []
        self.told: list[str] = []

    def read(self) -> str:
        for line in self._lines:
            return line
        raise EOFError

    def run(self, chat: Chat, write: Callable[[str], None] | None = None, stops=True) -> int:
        write = write or self.pieces.append
        return talk(
            chat, read=self.read, write=write, notify=self.told.append, stops_at_errors=stops
        )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def plain(generator: Generator, text: str) -> str:
    for name in generator.tokenizer.special_tokens:
        text = text.replace(name, "")
    return text


def expected(generator: Generator, questions: list[str], system: str | None = None) -> list[str]:
    """The answers when each question is asked at once with all before it."""
    said = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for question in questions:
        said.append(user(question))
        answers += answer(generator, [said], **SETTINGS)
        said.append({"role": "assistant", "content": plain(generator, answers[-1])})
    return answers


def test_answers_are_streamed_and_remembered(generator: Generator) -> None:
    fed = Fed("Who?\n", "", "  ", " Why? ", "Who?")
    assert fed.run(Chat(generator, **SETTINGS)) == 5
    answers = expected(generator, ["Who?", "Why?", "Who?"])
    assert "".join(fed.pieces) == "".join(f"{text}\n" for text in answers)
    assert answers[0] != answers[2]  # it knows that it was asked before
    assert len(fed.pieces) > 6
    assert fed.told == []


def test_reset_forgets_all_but_the_system_message(generator: Generator) -> None:
    fed = Fed("Who?", "/reset", "Who?", "/system Be brief.", "/reset", "Who?", "/reset", "Who?")
    chat = Chat(generator, **SETTINGS)
    fed.run(chat)
    [alone], [briefly] = (expected(generator, ["Who?"], text) for text in (None, "Be brief."))
    assert "".join(fed.pieces) == "".join(f"{t}\n" for t in (alone, alone, briefly, briefly))
    assert alone != briefly
    fed = Fed("/system", "/reset", "Who?")
    fed.run(chat)
    assert "".join(fed.pieces) == f"{alone}\n"


def test_an_interrupt_ends_the_answer_alone(generator: Generator) -> None:
    fed = Fed("Who?", "Why?")
    before = signal.getsignal(signal.SIGINT)

    def write(piece: str) -> None:
        fed.pieces.append(piece)
        if len(fed.pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    chat = Chat(generator, **SETTINGS)
    fed.run(chat, write)
    cut = "".join(fed.pieces[:2])
    assert fed.pieces[2] == "\n"
    assert fed.told == ["(stopped)"]
    assert chat.messages[1]["content"] == plain(generator, cut)
    # what was said until then is part of the chat
    said = [user("Who?"), chat.messages[1], user("Why?")]
    assert "".join(fed.pieces[3:]) == answer(generator, [said], **SETTINGS)[0] + "\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_special_tokens_in_an_answer_break_no_later_question(generator: Generator) -> None:
    begin = generator.tokenizer.special_tokens["<|begin|>"]
    weight = generator.model.output.weight.data
    weight[begin] = 0
    weight *= 1e-3  # all tokens about as likely
    settings = {"max_new_tokens": 300, "seed": 1}
    fed = Fed("Who?", "Why?")
    chat = Chat(generator, **settings)
    fed.run(chat)
    assert any(name in "".join(fed.pieces) for name in generator.tokenizer.special_tokens)
    assert not any(name in str(chat.messages) for name in generator.tokenizer.special_tokens)
