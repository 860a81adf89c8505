"""Formats of fine-tuning examples.

A row of a file becomes a conversation, or a prompt with its completion. Its keys decide the format:
OpenAI's messages, prompts and completions (as text, or as messages like TRL's), or ShareGPT's
conversations. If a row has the keys of several formats, the first format counts.

Messages of all file formats are normalized once, as `apply_chat_template` of transformers
does: keys whose value is null are dropped, and reasoning is written as `reasoning_content` and
`thinking`. Arguments of tool calls may be JSON text, as OpenAI writes them; templates expect their
value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torchtitan.base.errors import DataError
from torchtitan.data.text import check_characters
from torchtitan.finetune.chat import REASONING_KEYS, Conversation, Message, is_trained

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
TURN = "\n\nAssistant:"


@dataclass(frozen=True)
class Completion:
    """A prompt with its completion."""

    prompt: str
    completion: str
    where: str


Example = Conversation | Completion
Pair = tuple[Example, Example]
"""A prompt with the chosen answer, and with the rejected one."""
Row = dict[str, Any]


def parse_example(row: object, *, where: str) -> Example:
    """Return the example in a row; raise DataError if it has no known format."""
    if not isinstance(row, dict):
        raise DataError(f"{where} must be a JSON object, got {row!r:.60}")
    row = _without_nulls(row)
    for text in strings_in(row):
        check_characters(text, where=where)
    if "messages" in row:
        return _conversation(row["messages"], row, where)
    if "prompt" in row and "completion" in row:
        return _completion(row, where)
    if "conversations" in row:
        return _conversation(_sharegpt(row["conversations"], where=where), row, where)
    raise DataError(
        f"{where} must have the key messages, or prompt and completion, or conversations, got "
        f"keys {', '.join(map(repr, row)) or 'none'}"
    )


def parse_answers(row: object, *, where: str, train_on: str = "all") -> list[Example]:
    """Return the example in a row; for `train_on` "last" without what follows the last answer, and
    trained on that alone; for "each" so with each answer as the last one."""
    example = parse_example(row, where=where)
    if train_on == "all" or isinstance(example, Completion):
        return [example]
    messages = example.messages
    numbers = [i for i, message in enumerate(messages) if is_trained(message)]
    return [
        example._replace(messages=[*({**m, "train": False} for m in messages[:i]), messages[i]])
        for i in (numbers[-1:] if train_on == "last" else numbers)
    ] or [example]


def parse_pair(row: object, *, where: str) -> Pair:
    """Return the pair in a row; raise DataError if it is none.

    The row has `chosen` and `rejected`, and their `prompt`, all as text or all as messages. Without
    a prompt it is what both begin with, also if they are lists of messages beside its text.
    """
    if not isinstance(row, dict):
        raise DataError(f"{where} must be a JSON object, got {row!r:.60}")
    row = _without_nulls(row)
    row.pop("messages", None)  # UltraFeedback repeats the chosen answer there
    if missing := [key for key in ("chosen", "rejected") if not row.get(key)]:
        got = ", ".join(map(repr, row)) or "none"
        raise DataError(
            f"{where} must have the keys chosen and rejected, got keys {got}"
            + (f", of which {missing[0]} is empty" if missing[0] in row else "")
        )
    chosen, rejected, prompt = row.pop("chosen"), row.pop("rejected"), row.pop("prompt", None)
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected must differ, got {chosen!r:.60}")
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        raise DataError(f"{where}: chosen and rejected must both be text or both be messages")
    if prompt is None or (isinstance(prompt, str) and isinstance(chosen, list)):
        num = _num_shared(chosen, rejected)
        if num == 0:
            raise DataError(f"{where} must have a prompt like its answers, or they begin alike")
        prompt, chosen, rejected = chosen[:num], chosen[num:], rejected[num:]
    answers = [
        parse_example({**row, "prompt": prompt, "completion": answer}, where=where)
        for answer in (chosen, rejected)
    ]
    return answers[0], answers[1]


def _num_shared(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """Return how many messages, or characters, of two answers are their prompt."""
    pairs = enumerate(zip(chosen, rejected, strict=False))
    num = next((i for i, (a, b) in pairs if a != b), min(len(chosen), len(rejected)))
    if not isinstance(chosen, str):
        return min(num, len(chosen) - 1, len(rejected) - 1)
    turn = chosen.rfind(TURN, 0, num)  # as Anthropic's HH-RLHF separates turns
    if turn >= 0:
        return turn + len(TURN)
    return num - 1 if chosen[num - 1 : num] == " " else num


def _completion(row: Row, where: str) -> Example:
    prompt, completion = row["prompt"], row["completion"]
    if _are_objects(prompt) and _are_objects(completion):  # messages, as TRL has them
        untrained = [{**message, "train": False} for message in prompt]
        return _conversation([*untrained, *completion], row, where)
    for key in ("prompt", "completion"):
        if not isinstance(row[key], str):
            raise DataError(f"{where} must have text under {key!r}, got {row[key]!r:.60}")
    return Completion(prompt, completion, where)


def _sharegpt(turns: object, *, where: str) -> list[Message]:
    """Return the messages of ShareGPT's turns."""
    if not _are_objects(turns):
        raise DataError(f"{where}: conversations must be a list of objects, got {turns!r:.60}")
    messages: list[Message] = []
    for number, turn in enumerate(turns, start=1):
        message = {key: value for key, value in turn.items() if key not in ("from", "value")}
        if "from" in turn:
            speaker = turn["from"]
            if not isinstance(speaker, str) or speaker not in SPEAKERS:
                raise DataError(
                    f"{where}: from of turn {number} must be one of {', '.join(SPEAKERS)}, got "
                    f"{speaker!r:.60}"
                )
            key, value = "content", turn.get("value")
            if speaker == "function_call":
                key, value = "tool_calls", _calls(value, where=f"{where}: turn {number}")
            message = {"role": SPEAKERS[speaker], key: value, **message}
        messages.append(message)
    return messages


def _conversation(messages: object, row: Row, where: str) -> Conversation:
    tools = _parsed(row.get("tools")) or None  # an empty list is none
    if tools is not None and not _are_objects(tools):
        raise DataError(f"{where}: tools must be a list of objects, got {tools!r:.60}")
    if not _are_objects(messages) or not messages:
        raise DataError(f"{where}: messages must be a list of objects, got {messages!r:.60}")
    messages = [*map(_normalize, messages)]
    system = {"role": "system", "content": row.get("system")}
    if system["content"] and messages[0] != system:
        if messages[0].get("role") == "system":
            raise DataError(f"{where}: system and the first message are different system messages")
        messages.insert(0, system)
    for number, message in enumerate(messages, start=1):
        _check_message(message, where=f"{where}: message {number}")
    variables = row.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise DataError(f"{where}: chat_template_kwargs must be an object, got {variables!r:.60}")
    return Conversation(messages, tools, where, variables)


def _normalize(message: Message) -> Message:
    """Return a message as templates expect it; see the module's docstring."""
    message = _without_nulls(message)
    reasoning = next((message[key] for key in REASONING_KEYS if key in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    parts = message.get("content")
    if parts and _are_objects(parts) and all(part.get("type") == "text" for part in parts):
        texts: list[Any] = [part.get("text") for part in parts]
        if all(isinstance(text, str) for text in texts):
            message = {**message, "content": "".join(texts)}
    calls: Any = message.get("tool_calls")
    return {**message, "tool_calls": [*map(_parse_call, calls)]} if _are_objects(calls) else message


def _parse_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call of a tool with the value of its arguments, which may be JSON text."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _parse_call(call["function"])}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    arguments = _parsed(text) or {}  # "" of a call without arguments
    if isinstance(arguments, dict):
        arguments = _Arguments(arguments, text=text)
    return {**call, "arguments": arguments}


class _Arguments(dict[str, Any]):
    """Arguments given as JSON text: an object, and the text for templates that concatenate it."""

    def __init__(self, arguments: Mapping[str, Any], *, text: str) -> None:
        super().__init__(arguments)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, suffix: str) -> str:
        return self._text + suffix

    def __radd__(self, prefix: str) -> str:
        return prefix + self._text


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
        raise DataError(f"{where} must be calls of tools as JSON, got {text!r:.60}")
    return [{"type": "function", "function": {"arguments": {}, **call}} for call in calls]


def _without_nulls(row: Mapping[str, Any]) -> Row:
    return {key: value for key, value in row.items() if value is not None}


def _parsed(value: object) -> Any:
    """Return the value of JSON text, None for "", and any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        return value


def _are_objects(value: object) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def has_null_arguments(message: Message) -> bool:
    """Return whether a call of a tool has an argument that is null."""
    functions = (call.get("function", call) for call in message.get("tool_calls") or ())
    arguments = [f.get("arguments") for f in functions if isinstance(f, dict)]
    return any(isinstance(a, dict) and None in a.values() for a in arguments)


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
