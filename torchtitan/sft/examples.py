"""Examples to fine-tune on: read from JSON lines, checked, and made tokens with or without loss.

A line is a conversation, `{"messages": [{"role": ..., "content": ...}, ...]}`, or a prompt with its
completion, `{"prompt": ..., "completion": ...}`. The loss is on what the model has to write: the
assistant's words and the token that ends its turn; the completion and the end-of-document token. An
empty answer is not learnt, nor is one with `"weight": 0`.

A conversation is tokenised as one text, as when the model is used, and a token is learnt if any of
its characters is the assistant's. Templates with a special token on both sides of an answer have no
token with characters of two turns. A prompt and its completion are tokenised separately: nothing
stands between them, and in use the model gets only the tokens of the prompt.

The name of a special token in a message would end a turn too early, so it is an error. In prompts
and completions, which no template writes, it is plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError, Violation
from torchtitan.data.formats import READ, format_of
from torchtitan.data.rows import Reader, type_name
from torchtitan.data.source import open_parts
from torchtitan.data.text import any_of, check_characters
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.sft.chat import BEGIN_MARK, END_MARK, ChatTemplate, Conversation, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
WEIGHTS = ("0", "1", "0.0", "1.0")
SHAPES = (
    'either {"messages": [{"role": ..., "content": ...}, ...]} '
    'or {"prompt": ..., "completion": ...}'
)


@dataclass(frozen=True)
class Continuation:
    """A prompt with its completion."""

    prompt: str
    completion: str
    where: str


Example = Conversation | Continuation
Marked = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


def read_examples(file: Path) -> Iterator[Example]:
    """Yield the examples of a file of rows; a DataError names the place of a wrong one."""
    for part in open_parts(file):
        for value, where in reader_of(part.name)(part, ()):
            yield parse_example(value, where=where)


def reader_of(file: PurePath) -> Reader:
    """Return what reads the rows of a file; raise DataError if its name is not of rows."""
    read = format_of(file).rows
    if read is None:
        suffixes = ", ".join(suffix for suffix, how in READ.items() if how.rows)
        raise DataError(
            f'examples must be rows ({suffixes}), got {file}; text is read with dataset = "files"'
        )
    return read


def parse_example(value: object, *, where: str) -> Example:
    """Return the example in a line, or raise DataError. Other keys are ignored."""
    keys = value.keys() if isinstance(value, dict) else set()
    if not isinstance(value, dict) or ("messages" in keys) == bool({"prompt", "completion"} & keys):
        got = f"keys {', '.join(map(repr, keys))}" if keys else "neither"
        if not isinstance(value, dict):
            got = type_name(value)
        hint = '; text is read with dataset = "files"' if "text" in keys else ""
        raise DataError(f"{where} must be {SHAPES}, got {got}{hint}")
    for text in _strings(value):
        check_characters(text, where=where)
    if "messages" in keys:
        tools = value.get("tools")
        if tools is not None and not _are_objects(tools):
            raise DataError(f"{where}: tools must be a list of objects, got {tools!r:.60}")
        return Conversation(_messages(value["messages"], where=where), tools, where)
    for key in ("prompt", "completion"):
        if not isinstance(value.get(key), str):
            got = repr(value[key])[:60] if key in keys else f"keys {', '.join(map(repr, keys))}"
            raise DataError(f"{where} must have a {key} that is text, got {got}")
    return Continuation(value["prompt"], value["completion"], where)


def _messages(messages: object, *, where: str) -> Sequence[Message]:
    if not _are_objects(messages) or not messages:
        raise DataError(f"{where}: messages must be a list of objects, got {messages!r:.60}")
    assert isinstance(messages, list)
    for number, message in enumerate(messages, start=1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            got = repr(role)[:60] if "role" in message else "none"
            raise DataError(
                f"{where}: the role of message {number} must be one of {', '.join(ROLES)}, "
                f"got {got}"
            )
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            got = repr(content)[:60] if "content" in message else "none"
            raise DataError(
                f"{where}: message {number} must have a content that is text, got {got}"
            )
        weight = message.get("weight")
        # by repr: to Python true is 1
        if role == "assistant" and weight is not None and repr(weight) not in WEIGHTS:
            raise DataError(
                f"{where}: the weight of message {number} must be 0 (not learnt) or 1, got "
                f"{weight!r:.60}"
            )
    return messages


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _strings(value: object) -> Iterator[str]:
    """Yield all text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


class Encoder:
    """Turns examples into numbers: twice the id of each token, plus one if it is learnt.

    So a token store holds both. `num_without_end` counts the conversations in which the marks of
    the template leave out the end of the turn.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        # the marks too
        forbidden = [*tokenizer.special_tokens, BEGIN_MARK, END_MARK]
        self._forbidden = re.compile(any_of(forbidden))
        self.num_without_end = 0

    def encode(self, examples: Sequence[Example]) -> list[npt.NDArray[np.int64] | None]:
        """Return the numbers of each example, or None if there is nothing to learn in it.

        Template and tokenizer may run in other processes, so many at once cost less.
        """
        chats = [example for example in examples if isinstance(example, Conversation)]
        others = [example for example in examples if isinstance(example, Continuation)]
        rows = {
            Conversation: iter(self._conversations(chats) if chats else ()),
            Continuation: iter(self._continuations(others) if others else ()),
        }
        marked = (next(rows[type(example)]) for example in examples)
        # the first token is predicted from nothing
        return [2 * ids + due if due[1:].any() else None for ids, due in marked]

    def _continuations(self, examples: Sequence[Continuation]) -> Iterator[Marked]:
        texts = [text for each in examples for text in (each.prompt, each.completion)]
        encoded = self._tokenizer.encode_batch(texts)
        for prompt, completion in zip(encoded[::2], encoded[1::2], strict=True):
            end = [self._tokenizer.eos_id] if len(completion) else []
            ids = np.concatenate([prompt, completion, np.array(end, np.int64)]).astype(np.int64)
            yield ids, np.arange(len(ids)) >= len(prompt)

    def ask(self, question: Conversation) -> list[int]:
        """Return the tokens after which the model writes the next answer."""
        template = self._checked(question)
        text = template.render(question, add_generation_prompt=True)
        return list(self._tokenizer.encode_special([text])[0].ids)

    def _checked(self, example: Conversation) -> ChatTemplate:
        """Return the template; raise DataError if there is none, or a message spells a token."""
        if self._template is None:
            rule = (
                f"must name a Jinja file: {example.where} has messages, which need a chat "
                f"template, and the tokenizer has none (chat_template.jinja or "
                f"tokenizer_config.json beside it)"
            )
            raise DataError(Violation(("chat_template",), rule))
        for text in _strings([*example.messages, *(example.tools or ())]):
            if found := self._forbidden.search(text):
                raise DataError(
                    f"{example.where}: no message may spell a special token, which could end its "
                    f"turn, found {found[0]!r}; remove it, or write it differently"
                )
        return self._template

    def _conversations(self, examples: Sequence[Conversation]) -> Iterator[Marked]:
        (template, *_) = [self._checked(example) for example in examples]
        rendered = template.conversations(examples)
        encoded = self._tokenizer.encode_special([each.text for each in rendered])
        for text, (ids, ends) in zip(rendered, encoded, strict=True):
            self.num_without_end += template.leaves_out_end(text)
            yield np.array(ids, np.int64), touched(ends, spans=text.spans)


def touched(ends: Sequence[int], *, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return which tokens have a character in one of the spans, given where each token ends.

    A token begins where the one before it ends; tokens that share a character each have all of it.
    """
    stops = np.array(ends, np.int64)
    starts = np.minimum(np.concatenate([[0], stops])[:-1], stops - 1)
    due = np.zeros(len(stops), np.bool_)
    for first, last in spans:
        due |= (starts < last) & (stops > first)
    return due
