"""Rows of fine-tuning data in nine shapes, and their tokens and labels by `transformers`.

Rows are drawn from a seed, with text that is hard to tokenize. Each row has its conversation, so
that its labels need no parser of shapes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

SHAPES = (
    "messages",
    "several turns",
    "system",
    "prompt and completion",
    "tools",
    "left out",
    "conversations",
    "messages as prompt and completion",
    "rendered chat",
)
SEVERAL = "several turns", "left out", "conversations", "messages as prompt and completion"
SPEAKERS = {"system": "system", "user": "human", "assistant": "gpt"}
SUBJECTS = "the river", "a prime number", "Zürich", "中文", "the 🚀", "list.sort()", "  two spaces"
FORMS = "What is {}?", "Tell me of {},\nbriefly.", "Spell {}!", "Why {}? I do not know."
ANSWERS = "It is {}.", "def f(x):\n    return {!r}\n", "{}: yes, naïve café.", "1. {}\n2. none  "
Message = dict[str, Any]


class Row(NamedTuple):
    """A row of a file, and the conversation in it."""

    value: dict[str, Any]
    messages: list[Message]
    """In the format of the template; empty for a prompt and a completion."""
    trained: list[bool]
    """Whether each message is trained on."""
    tools: list[dict[str, Any]] | None = None


class Labelled(NamedTuple):
    """Token ids of an example, and whether each is trained on."""

    ids: list[int]
    trained: list[bool]


def make_rows(
    shapes: Sequence[str], *, num: int, seed: int, render: Callable[[list[Message]], str]
) -> list[Row]:
    """Return rows of the shapes in turn. `render` writes messages and the start of an answer."""
    rng = random.Random(seed)
    return [make_row(shapes[i % len(shapes)], rng=rng, render=render) for i in range(num)]


def make_row(shape: str, *, rng: random.Random, render: Callable[[list[Message]], str]) -> Row:
    """Draw a row of a shape."""

    def say(role: str, forms: Sequence[str]) -> Message:
        return {"role": role, "content": rng.choice(forms).format(rng.choice(SUBJECTS))}

    num_turns = rng.randint(2, 4) if shape in SEVERAL else 1
    forms = {"user": FORMS, "assistant": ANSWERS}
    messages = [say(role, forms[role]) for _ in range(num_turns) for role in forms]
    tools = None
    if shape == "system" or (shape == "conversations" and rng.random() < 0.5):
        messages.insert(0, say("system", ("You know {}.",)))
    if shape == "tools":
        tools = [{"type": "function", "function": {"name": "find", "parameters": {}}}]
        call = {"name": "find", "arguments": {"what": rng.choice(SUBJECTS)}}
        called = {"tool_calls": [{"type": "function", "function": call}]}
        found = [
            {"role": "assistant", "content": "", **called},
            say("tool", ('{{"found": "{}"}}',)),
        ]
        messages[1:1] = found
    trained = [message["role"] == "assistant" for message in messages]
    prompt, completion = (message["content"] for message in messages[:2])
    if shape == "prompt and completion":
        return Row({"prompt": prompt, "completion": f" {completion}"}, [], [])
    if shape == "rendered chat":
        # TRL tokenizes both as one text: a space at the seam would join the line end before it
        value = {"prompt": render(messages[:1]), "completion": completion.lstrip()}
        return Row(value, [], [])
    if shape == "conversations":
        turns = [{"from": SPEAKERS[m["role"]], "value": m["content"]} for m in messages]
        return Row({"conversations": turns}, messages, trained)
    if shape == "messages as prompt and completion":
        value = {"prompt": messages[:-1], "completion": messages[-1:]}
        return Row(value, messages, [False] * (len(messages) - 1) + [True])
    written = messages
    if shape == "left out":
        out = [i for i, keep in enumerate(trained) if keep][:-1]
        more = {i: rng.choice(({"train": False}, {"weight": 0})) for i in out}
        written = [{**message, **more.get(i, {})} for i, message in enumerate(messages)]
        trained = [keep and i not in out for i, keep in enumerate(trained)]
    return Row(
        {"messages": written, **({"tools": tools} if tools else {})}, messages, trained, tools
    )


def label_by_prefixes(row: Row, tokenizer: Any) -> Labelled:
    """Return the tokens and labels of a row by `transformers`.

    An answer is the text after the generation prompt, up to the last special token.
    """
    if not row.messages:
        given = tokenizer(row.value["prompt"]).input_ids
        said = tokenizer(row.value["completion"], add_special_tokens=False).input_ids
        ends = row.value["completion"].rstrip().endswith(tokenizer.eos_token)
        said = said if ends else [*said, tokenizer.eos_token_id]
        return Labelled([*given, *said], [False] * len(given) + [True] * len(said))

    def ids_of(num: int, *, asks: bool = False) -> list[int]:
        ids: list[int] = tokenizer.apply_chat_template(
            row.messages[:num], tools=row.tools, add_generation_prompt=asks, return_dict=False
        )
        return ids

    special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    whole = ids_of(len(row.messages))
    trained = [False] * len(whole)
    for i in (i for i, keep in enumerate(row.trained) if keep):
        before, after = ids_of(i, asks=True), ids_of(i + 1)
        pairs = enumerate(zip(before, after, strict=False))
        start = next((j for j, (a, b) in pairs if a != b), len(before))
        # the last token before an answer may be joined with its first character
        if start < len(before) - 1 or whole[: len(after)] != after:
            raise ValueError(f"the template writes message {i + 1} otherwise once others follow")
        special = [j for j in range(start, len(after)) if after[j] in special_ids]
        stop = special[-1] + 1 if special else len(after)
        trained[start:stop] = [True] * (stop - start)
    return Labelled(whole, trained)
