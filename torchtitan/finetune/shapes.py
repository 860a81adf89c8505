"""The shapes that an example may have, as people publish them, and what is checked of each.

A shape is told by its keys, and becomes a conversation or a prompt with its completion: OpenAI's
chats and completions, the chats of ShareGPT, the instructions of Alpaca. Of a row with the keys of
several the first of these is read. Other keys are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan.base.errors import DataError
from torchtitan.data.readers import type_name
from torchtitan.data.text import check_characters
from torchtitan.finetune.chat import Conversation, Message

ROLES = ("system", "developer", "user", "assistant", "tool")
WEIGHTS = ("0", "1", "0.0", "1.0")
SPEAKERS: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""The role of each name that ShareGPT has for who speaks."""


@dataclass(frozen=True)
class Continuation:
    """A prompt with its completion."""

    prompt: str
    completion: str
    where: str


Example = Conversation | Continuation
Value = dict[str, Any]


class Shape(NamedTuple):
    """How a row becomes an example; all of `keys` tell it."""

    looks: str
    keys: frozenset[str]
    parse: Callable[[Value, str], Example]


def parse_example(value: object, *, where: str) -> Example:
    """Return the example in a row, or raise DataError."""
    # a column of a table that has no value here is null
    keys = {k for k, v in value.items() if v is not None} if isinstance(value, dict) else set()
    whole = [shape for shape in SHAPES if shape.keys <= keys]
    # where none is whole, a prompt without completion or the reverse says which key is missing
    found = whole or [shape for shape in SHAPES[:2] if shape.keys & keys]
    if not isinstance(value, dict) or not found:
        got = type_name(value)
        if isinstance(value, dict):
            got = f"keys {', '.join(map(repr, value))}" if value else "no keys"
        hint = '; text is read with dataset = "files"' if "text" in keys else ""
        looks = ", ".join(shape.looks for shape in SHAPES)
        raise DataError(f"{where} must be one of {looks}, got {got}{hint}")
    for text in strings_in(value):
        check_characters(text, where=where)
    return found[0].parse(value, where)


def _continuation(value: Value, where: str) -> Continuation:
    prompt, completion = (_text(value, key, where=where) for key in ("prompt", "completion"))
    return Continuation(prompt, completion, where)


def _openai(value: Value, where: str) -> Conversation:
    return _conversation(value["messages"], value, where)


def _sharegpt(value: Value, where: str) -> Conversation:
    turns = value["conversations"]
    if not _are_objects(turns):
        raise DataError(f"{where}: conversations must be a list of objects, got {turns!r:.60}")
    system = _text(value, "system", where=where)
    messages = [{"role": "system", "content": system}] if system else []
    for number, turn in enumerate(turns, start=1):
        speaker = turn.get("from")
        if "role" not in turn and speaker not in SPEAKERS:
            raise DataError(
                f"{where}: who speaks (from) in turn {number} must be one of "
                f"{', '.join(SPEAKERS)}, got {speaker!r:.60}"
            )
        said = {"role": SPEAKERS.get(speaker), "content": turn.get("value")}
        messages.append(said | {k: v for k, v in turn.items() if k not in ("from", "value")})
    return _conversation(messages, value, where)


def _alpaca(value: Value, where: str) -> Conversation:
    instruction, more, output, system = (
        _text(value, key, where=where) for key in ("instruction", "input", "output", "system")
    )
    turns = value.get("history") or []
    if not isinstance(turns, list) or any(not _is_pair(turn) for turn in turns):
        raise DataError(
            f"{where}: history must be a list of pairs of question and answer, got {turns!r:.60}"
        )
    question = f"{instruction}\n\n{more}" if more else instruction
    messages = [{"role": "system", "content": system}] if system else []
    for asked, answered in [*turns, (question, output)]:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    return _conversation(messages, value, where)


SHAPES = (
    Shape('{"messages": [{"role": ..., "content": ...}, ...]}', frozenset({"messages"}), _openai),
    Shape('{"prompt": ..., "completion": ...}', frozenset({"prompt", "completion"}), _continuation),
    Shape(
        '{"conversations": [{"from": ..., "value": ...}, ...]}',
        frozenset({"conversations"}),
        _sharegpt,
    ),
    Shape(
        '{"instruction": ..., "input": ..., "output": ...}',
        frozenset({"instruction", "output"}),
        _alpaca,
    ),
)
"""Of several that a row has the keys of, the first counts."""
OPTIONAL = ("input", "system")


def _text(value: Value, key: str, *, where: str) -> str:
    if key in OPTIONAL and value.get(key) is None:
        return ""
    if not isinstance(value.get(key), str):
        got = repr(value[key])[:60] if key in value else f"keys {', '.join(map(repr, value))}"
        raise DataError(f"{where} must have text under {key!r}, got {got}")
    text: str = value[key]
    return text


def _conversation(messages: object, value: Value, where: str) -> Conversation:
    tools = value.get("tools")
    if tools is not None and not _are_objects(tools):
        raise DataError(f"{where}: tools must be a list of objects, got {tools!r:.60}")
    return Conversation(_messages(messages, where=where), tools, where)


def _messages(messages: object, *, where: str) -> Sequence[Message]:
    if not _are_objects(messages) or not messages:
        raise DataError(f"{where}: messages must be a list of objects, got {messages!r:.60}")
    assert isinstance(messages, list)
    messages = [*map(_with_plain_content, messages)]
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


def _with_plain_content(message: Message) -> Message:
    """Join a content in parts, as OpenAI's may be, if all of them are text."""
    parts = message.get("content")
    if not _are_objects(parts) or not parts:
        return message
    assert isinstance(parts, list)
    texts = [part.get("text") for part in parts if part.get("type") == "text"]
    is_text = len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return {**message, "content": "".join(texts)} if is_text else message


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and [type(item) for item in value] == [str, str]


def strings_in(value: object) -> Iterator[str]:
    """Yield all text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
