"""The shapes of examples: each as the conversation that it stands for, and what is wrong in it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.finetune.chats import CHAT, read_examples, write_lines
from torchtitan.finetune.chat import Conversation
from torchtitan.finetune.examples import Completion, parse_answers, parse_example


def say(role: object, content: object, **more: object) -> dict[str, object]:
    return {"role": role, "content": content, **more}


def turn(speaker: str, value: object, **more: object) -> dict[str, object]:
    return {"from": speaker, "value": value, **more}


ASK = [say("user", "ask"), say("assistant", "answer")]
SYSTEM = say("system", "you help")
SHAPES: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
    ({"messages": ASK}, ASK),
    ({"messages": [say("user", [{"type": "text", "text": t} for t in ("a", "sk")]), ASK[1]]}, ASK),
    ({"conversations": [turn("human", "ask"), turn("gpt", "answer")]}, ASK),
    ({"conversations": [turn("user", "ask"), turn("assistant", "answer")], "id": 1}, ASK),
    ({"conversations": ASK}, ASK),
    (
        {"system": "you help", "conversations": [turn("human", "ask"), turn("gpt", "answer")]},
        [SYSTEM, *ASK],
    ),
    (
        {"conversations": [turn("system", "you help"), turn("gpt", "a", weight=0)]},
        [SYSTEM, say("assistant", "a", weight=0)],
    ),
    (
        {"conversations": [turn("human", "ask"), turn("gpt", "answer", train=False)]},
        [ASK[0], {**ASK[1], "train": False}],
    ),
    # TRL's prompt and completion as messages: of the prompt nothing is learnt
    (
        {"prompt": [*ASK, ASK[0]], "completion": [ASK[1]]},
        [{**message, "train": False} for message in [*ASK, ASK[0]]] + [ASK[1]],
    ),
    ({"prompt": [], "completion": ASK}, ASK),
    # the first shape whose keys are all there
    ({"prompt": "ask", "prompt_id": "1", "messages": ASK}, ASK),
    ({"prompt": "p", "conversations": [turn("human", "ask"), turn("gpt", "answer")]}, ASK),
    ({"prompt": "p", "completion": None, "conversations": ASK}, ASK),
    ({"system": "you help", "messages": ASK}, [SYSTEM, *ASK]),
]


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize(("value", "messages"), SHAPES)
def test_a_shape_is_a_conversation(value: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert parse_example(value, where="here") == Conversation(messages, None, "here")


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize(("train_on", "ends"), [("all", [4]), ("last", [4]), ("each", [2, 4])])
def test_each_answer_or_the_last(train_on: str, ends: list[int]) -> None:
    messages = [*ASK, ASK[0], say("assistant", "last")]
    found = parse_answers({"messages": [*messages, ASK[0]]}, where="here", train_on=train_on)
    for example, end in zip(found, ends, strict=True):
        assert isinstance(example, Conversation)
        if train_on == "all":
            assert example.messages == [*messages, ASK[0]]
        else:
            earlier = [{**message, "train": False} for message in messages[: end - 1]]
            assert example.messages == [*earlier, messages[end - 1]]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        ('{"name": "f", "arguments": {"x": 1}}', [CALL]),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', [CALL]),
        (
            '[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": 1}}]',
            [CALL] * 2,
        ),
        ({"name": "f", "arguments": {"x": 1}}, [CALL]),
        (
            '{"name": "f", "arguments": ""}',
            [{"type": "function", "function": {"name": "f", "arguments": {}}}],
        ),
        ('{"name": "f"}', [{"type": "function", "function": {"name": "f", "arguments": {}}}]),
    ],
)
def test_calls_of_tools_as_sharegpt_has_them(value: object, calls: list[Any]) -> None:
    turns = [turn("human", "ask"), turn("function_call", value), turn("observation", "1")]
    row = {"conversations": turns, "tools": json.dumps(TOOLS), "system": ""}
    messages = [ASK[0], {"role": "assistant", "tool_calls": calls}, say("tool", "1")]
    assert parse_example(row, where="here") == Conversation(messages, TOOLS, "here")


def test_examples_of_any_format(tmp_path: Path) -> None:
    calls = [say("user", "a"), say("assistant", "", tool_calls=[{"name": "f"}]), say("tool", "b")]
    values = [{"messages": CHAT}, {"messages": calls}]
    oracle = read_examples(Path(write_lines(tmp_path / "a.jsonl", [*values])))
    (tmp_path / "a.json").write_text(json.dumps(values))
    file = io.BytesIO()
    # a struct has all keys: those that a message lacks are null
    pq.write_table(pa.Table.from_pylist(values), file)
    (tmp_path / "a.parquet").write_bytes(file.getvalue())
    for name in ("a.json", "a.parquet"):
        found = read_examples(tmp_path / name)
        assert [each.messages for each in found] == [each.messages for each in oracle]  # type: ignore[union-attr]
    assert found[1].where == f"{tmp_path / 'a.parquet'} row 2"
    (tmp_path / "a.csv").write_text("prompt,completion\nask,answer\n")
    assert read_examples(tmp_path / "a.csv") == [
        Completion("ask", "answer", f"{tmp_path / 'a.csv'} line 2")
    ]
