"""Messages as other programs write them give the text of `transformers`, in JSON and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from tests.finetune.chats import read_examples, write_lines, write_tokenizer
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.finetune.chat import Conversation, find_template
from torchtitan.finetune.data import build_examples

LLAMA31 = """{% for m in messages %}{% if 'tool_calls' in m %}CALL {{ m.tool_calls | tojson }}
{% endif %}{{ m.role + ': ' }}{{ m.content }}<|end|>{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}"""
QWEN3 = """{% for m in messages %}{{ m.role + ': ' }}
{%- if m.role == 'assistant' %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}
{{- m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""
GPT_OSS = QWEN3.replace("reasoning_content", "thinking")
HERMES = """{% for m in messages %}{{ m.role + ': ' }}{% for call in m.tool_calls or [] %}
{{- call.function | tojson }}{% else %}{{ m.content }}{% endfor %}<|end|>{% endfor %}
{%- if add_generation_prompt %}assistant: {% endif %}"""

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello."}


def call(arguments: object) -> dict[str, Any]:
    function = {"name": "w", "arguments": arguments}
    return {"id": "1", "type": "function", "function": function}


ROME = call({"city": "Rome"})
CASES = {
    "no content": (LLAMA31, [HI, {"role": "assistant", "content": None, "tool_calls": [ROME]}]),
    "no calls": (LLAMA31, [HI, {**HELLO, "tool_calls": None, "refusal": None}]),
    "missing content": (HERMES, [HI, {"role": "assistant", "tool_calls": [ROME]}]),
    **{
        f"{name}, {key}": (template, [HI, {**HELLO, key: "Greets."}])
        for name, template in (("qwen3", QWEN3), ("gpt-oss", GPT_OSS))
        for key in ("reasoning_content", "reasoning", "thinking")
    },
}


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_the_text_is_that_of_transformers(tmp_path: Path, case: str, suffix: str) -> None:
    source, messages = CASES[case]
    folder = write_tokenizer(tmp_path / "tokenizer", template=source)
    # a second row, so that the columns of a table have keys that only one row has
    rows: list[Any] = [{"messages": messages}, {"messages": [HI, HELLO]}]
    file = tmp_path / f"a{suffix}"
    if suffix == ".jsonl":
        write_lines(file, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    template = find_template(
        None, tokenizer=build_tokenizer(str(folder)), tokenizer_path=str(folder)
    )
    oracle = AutoTokenizer.from_pretrained(folder)
    assert template is not None
    for example, row in zip(read_examples(file), rows, strict=True):
        assert isinstance(example, Conversation)
        expected = oracle.apply_chat_template(row["messages"], tokenize=False)
        assert "None" not in expected
        assert template.render(example) == expected


@pytest.mark.promise("chat-masks")
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, {**HELLO, "tool_calls": [call(json.dumps({"city": "Rome"}))]}]},
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": json.dumps(ROME["function"])},
            ]
        },
    ],
)
def test_arguments_that_are_text_are_not_quoted_twice(tmp_path: Path, row: object) -> None:
    folder = write_tokenizer(tmp_path, template=HERMES)
    tokenizer = build_tokenizer(str(folder))
    template = find_template(None, tokenizer=tokenizer, tokenizer_path=str(folder))
    [example] = read_examples(Path(write_lines(tmp_path / "a.jsonl", [row])))
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [HI, {"role": "assistant", "tool_calls": [ROME]}], tokenize=False
    )
    assert template is not None
    assert isinstance(example, Conversation)
    text = template.render(example)
    assert json.loads(text.split("assistant: ")[1].removesuffix("<|end|>")) == ROME["function"]
    assert sorted(text) == sorted(expected)  # ShareGPT's order of keys may differ


@pytest.mark.promise("chat-masks")
def test_conversations_with_tools_have_their_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    file = folder / "tokenizer_config.json"
    named = {"default": HERMES, "tool_use": "{{ tools | tojson }}" + HERMES}
    templates = [{"name": name, "template": text} for name, text in named.items()]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": templates}))
    tools = [{"type": "function", "function": {"name": "w"}}]
    rows: list[Any] = [{"messages": [HI, HELLO], "tools": given} for given in (tools, None)]
    training = TrainingConfig(
        dataset="examples",
        dataset_path=(write_lines(tmp_path / "a.jsonl", rows),),
        dataset_cache=str(tmp_path / "cache"),
        seq_len=256,
    )
    tokenizer = build_tokenizer(str(folder))
    dataset = build_examples(training, tokenizer=tokenizer, tokenizer_path=str(folder), seed=0)
    oracle = AutoTokenizer.from_pretrained(folder)
    samples = [dataset.sources[0][i] for i in range(2)]
    texts = {tokenizer.decode(sample["tokens"][: sample["length"]].tolist()) for sample in samples}
    assert texts == {
        # the last token is only a label
        oracle.apply_chat_template([HI, HELLO], tools=each, tokenize=False).removesuffix("<|end|>")
        for each in (tools, None)
    }


CONCATENATED = """{% for m in messages %}{{ m.role + ': ' }}{% for c in m.tool_calls or [] %}
{{- '```json ' + c.function.arguments + ' ```' }}{% else %}{{ m.content }}{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@pytest.mark.promise("chat-masks")
def test_a_template_may_concatenate_the_text_of_arguments(tmp_path: Path) -> None:
    """DeepSeek's templates do, and `transformers` gives them what the row has."""
    messages = [HI, {"role": "assistant", "content": "", "tool_calls": [call('{"city":  "Rome"}')]}]
    [example] = read_examples(Path(write_lines(tmp_path / "a.jsonl", [{"messages": messages}])))
    folder = write_tokenizer(tmp_path, template=CONCATENATED)
    template = find_template(
        None, tokenizer=build_tokenizer(str(folder)), tokenizer_path=str(folder)
    )
    assert template is not None
    assert isinstance(example, Conversation)
    oracle = AutoTokenizer.from_pretrained(folder)
    assert template.render(example) == oracle.apply_chat_template(messages, tokenize=False)
