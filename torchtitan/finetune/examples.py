"""Formats of fine-tuning examples.

A row of a file becomes a conversation, or a prompt with its completion.

The format follows from the row's keys: OpenAI's chats and completions, ShareGPT's chats, or
Alpaca's instructions. If a row has the keys of several formats, the first one counts. Other keys
are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
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
    "function_call": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Roles by ShareGPT's names of speakers."""
OPTIONAL = ("input", "system")


@dataclass(frozen=True)
class Completion:
    """A prompt with its completion."""

    prompt: str
    completion: str
    where: str


Example = Conversation | Completion
Row = dict[str, Any]


class Format(NamedTuple):
    """A format of rows."""

    shown: str
    """A row, for messages."""
    keys: frozenset[str]
    """Keys that a row of this format has."""
    parse: Callable[[Row, str], Example]


def parse_example(row: object, *, where: str) -> Example:
    """Return the example in a row; raise DataError if it has no known format."""
    # a column of a table without a value in this row is null
    keys = {k for k, v in row.items() if v is not None} if isinstance(row, dict) else set()
    found = [format for format in FORMATS if format.keys <= keys]
    if not found and {"chosen", "rejected"} <= keys:
        raise DataError(
            f"{where} must be one example, got preference data (keys 'chosen', 'rejected'); write "
            f"the chosen answer as a completion or a chat"
        )
    if not isinstance(row, dict) or not found:
        got = type_name(row)
        if isinstance(row, dict):
            got = f"keys {', '.join(map(repr, row))}" if row else "no keys"
        shown = ", ".join(format.shown for format in FORMATS)
        raise DataError(f"{where} must be one of {shown}, got {got}")
    for text in strings_in(row):
        check_characters(text, where=where)
    return found[0].parse(row, where)


def _completion(row: Row, where: str) -> Example:
    prompt: Any = row.get("prompt")
    completion: Any = row.get("completion")
    if _are_objects(prompt) and _are_objects(completion):  # messages, as TRL has them
        given = [{**message, "train": False} for message in prompt]
        return _conversation([*given, *completion], row, where)
    return Completion(_text(row, "prompt", where), _text(row, "completion", where), where)


def _openai(row: Row, where: str) -> Conversation:
    return _conversation(row["messages"], row, where)


def _sharegpt(row: Row, where: str) -> Conversation:
    turns = row["conversations"]
    if not _are_objects(turns):
        raise DataError(f"{where}: conversations must be a list of objects, got {turns!r:.60}")
    messages = _system(row, where)
    for number, turn in enumerate(turns, start=1):
        speaker = turn.get("from")
        role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None and "role" not in turn:
            raise DataError(
                f"{where}: from of turn {number} must be one of {', '.join(SPEAKERS)}, got "
                f"{speaker!r:.60}"
            )
        if not {"value", "content", "tool_calls"} & turn.keys():
            got = ", ".join(map(repr, turn))
            raise DataError(f"{where}: turn {number} must have its text as 'value', got keys {got}")
        said: Message = {"content": turn.get("value")}
        if speaker == "function_call":
            said = {"tool_calls": _calls(said["content"], where=f"{where}: turn {number}")}
        rest = {k: v for k, v in turn.items() if k not in ("from", "value")}
        messages.append({"role": role, **said, **rest})
    return _conversation(messages, row, where)


def _alpaca(row: Row, where: str) -> Conversation:
    instruction, context, output = (
        _text(row, key, where) for key in ("instruction", "input", "output")
    )
    turns = row.get("history") or []
    if not isinstance(turns, list) or any(not _is_pair(turn) for turn in turns):
        raise DataError(
            f"{where}: history must be a list of [question, answer] pairs, got {turns!r:.60}"
        )
    question = f"{instruction}\n\n{context}" if context else instruction
    messages = _system(row, where)
    for asked, answered in [*turns, (question, output)]:
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": answered})
    return _conversation(messages, row, where)


FORMATS = (
    Format('{"messages": [{"role": ..., "content": ...}, ...]}', frozenset({"messages"}), _openai),
    Format('{"prompt": ..., "completion": ...}', frozenset({"prompt", "completion"}), _completion),
    Format(
        '{"conversations": [{"from": ..., "value": ...}, ...]}',
        frozenset({"conversations"}),
        _sharegpt,
    ),
    Format(
        '{"instruction": ..., "input": ..., "output": ...}',
        frozenset({"instruction", "output"}),
        _alpaca,
    ),
)


def _text(row: Row, key: str, where: str) -> str:
    text = row.get(key)
    if text is None and key in OPTIONAL:
        return ""
    if not isinstance(text, str):
        got = f"{text!r:.60}" if key in row else f"keys {', '.join(map(repr, row))}"
        raise DataError(f"{where} must have text under {key!r}, got {got}")
    return text


def _system(row: Row, where: str) -> list[Message]:
    text = _text(row, "system", where)
    return [{"role": "system", "content": text}] if text else []


def _conversation(messages: object, row: Row, where: str) -> Conversation:
    tools = _parsed(row.get("tools")) or None  # an empty list is none
    if tools is not None and not _are_objects(tools):
        raise DataError(f"{where}: tools must be a list of objects, got {tools!r:.60}")
    if not _are_objects(messages) or not messages:
        raise DataError(f"{where}: messages must be a list of objects, got {messages!r:.60}")
    assert isinstance(messages, list)
    messages = [*map(_join_parts, messages)]
    for number, message in enumerate(messages, start=1):
        _check_message(message, where=f"{where}: message {number}")
    return Conversation(messages, tools, where)


def _check_message(message: Message, *, where: str) -> None:
    role, content = message.get("role"), message.get("content")
    weight, train = message.get("weight"), message.get("train")
    if role not in ROLES:
        got = f"{role!r:.60}" if "role" in message else "none"
        raise DataError(f"{where} must have a role of {', '.join(ROLES)}, got {got}")
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        got = f"{content!r:.60}" if "content" in message else "none"
        raise DataError(f"{where} must have text as content, got {got}")
    # by repr: True == 1
    if role == "assistant" and weight is not None and repr(weight) not in WEIGHTS:
        raise DataError(f"{where} must have weight 0 (not trained on) or 1, got {weight!r:.60}")
    # by identity: 0 == False
    if not (train is None or train is False or (train is True and role == "assistant")):
        allowed = "true or false" if role == "assistant" else f"false, as its role is {role}"
        raise DataError(f"{where} must have train {allowed}, got {train!r:.60}")


def _calls(text: object, *, where: str) -> list[dict[str, Any]]:
    """Return the calls of tools in the JSON text of a turn, as OpenAI's `tool_calls`."""
    calls = _parsed(text)
    calls = calls if isinstance(calls, list) else [calls]
    if not calls or not all(isinstance(call, dict) and "name" in call for call in calls):
        raise DataError(
            f'{where} must be a call of a tool as JSON, {{"name": ..., "arguments": ...}}, or a '
            f"list of them, got {text!r:.60}"
        )
    # templates write arguments as JSON: those that are JSON already would be quoted
    functions = [{**call, "arguments": _parsed(call.get("arguments", {}))} for call in calls]
    return [{"type": "function", "function": function} for function in functions]


def _parsed(value: object) -> Any:
    """Return the value of JSON text, None for "", and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _join_parts(message: Message) -> Message:
    """Join content in parts, as OpenAI's may be, if all of them are text."""
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
    """Yield all text in a JSON value, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)
