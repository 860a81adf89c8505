"""What tests of examples share: templates as models have them, and a Hugging Face tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from torchtitan.data.readers import read_rows
from torchtitan.finetune.examples import Example, parse_example

SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|start_header|>", "<|eot|>"]

CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date is defined %}
    {%- set date = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header|>system<|start_header|>\\n\\nToday: " + date + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header|>' + message['role'] + '<|start_header|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {{- '<|start_header|>assistant<|start_header|>\\n\\n' }}
        {{- message.tool_calls[0].function | tojson + '<|eot|>' }}
    {%- else %}
        {{- '<|start_header|>tool<|start_header|>\\n\\n' + message.content + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header|>assistant<|start_header|>\\n\\n' }}
{%- endif %}
"""

MARKED = """\
{% for message in messages %}
    {% if loop.index0 > 40 %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}

    {% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

INSTRUCT = """\
{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}
{{ '[INST] ' + message.content + ' [/INST]' }}{% else %}
{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "marked": MARKED, "instruct": INSTRUCT}

CHAT = [
    {"role": "user", "content": "  Naïve café \U0001f600\U0001f680?\n"},
    {"role": "assistant", "content": "  \U0001f600 Yes, <b>中文</b>.  "},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "Nothing\n\n  more."},
]


def write_tokenizer(folder: Path, *, template: str | None = None, begins: bool = False) -> Path:
    """Write a byte-level tokenizer with special tokens, and a template; return its folder.

    `begins`: whether `<|begin|>` precedes each text, as in Llama 3.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # as models have it: offsets leave leading spaces out
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(name, special=True) for name in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the user and then the assistant says nothing more, \n\n"], trainer
    )
    tokenizer.add_tokens(["<think>"])
    if begins:
        begin = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", SPECIAL.index("<|begin|>"))]
        )
        both = [tokenizer.post_processor, begin]
        tokenizer.post_processor = processors.Sequence(both)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>"},
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_lines(file: Path, values: list[object]) -> str:
    """Write a JSON Lines file; return its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(file)


def read_examples(file: Path) -> list[Example]:
    return [parse_example(row.value, where=row.where) for row in read_rows(file)]
