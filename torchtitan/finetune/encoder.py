"""Tokenize examples, and label the tokens to train on.

The loss is on what the model has to write: the assistant's text and the token that ends its turn,
or a completion and the end-of-document token.

A conversation is tokenized as one text, as in inference, and a token is trained on if any of its
characters is the assistant's. In templates with a special token on both sides of an answer, no
token has characters of two turns. A prompt and its completion are tokenized separately: nothing is
between them, and in inference the model gets only the tokens of the prompt.

The name of a special token in the text of an example is an error unless the settings encode it:
as plain text it is learnt in pieces that no model receives, and as a token it may end a turn too
early. The tokenizer decides on text before the first token of a prompt, such as a start token:
training gets the same tokens as inference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError
from torchtitan.data.text import any_of
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.finetune.chat import (
    BEGIN_MARK,
    END_MARK,
    REASONING_KEYS,
    ChatTemplate,
    Conversation,
    Rendered,
)
from torchtitan.finetune.examples import Completion, Example, has_null_arguments, strings_in

READ_HERE = ("role", "content", "weight", "train")
"""Keys of messages that have a meaning under any template."""
NULL_ARGUMENTS = (
    "arguments of tool calls are null, as the library datasets writes a key that a row lacks, and "
    "are trained on as null; remove such keys"
)
MISSING_ENDS = {
    "outside tags": "the template's {% generation %} tags leave out the token that ends the turn, "
    "so the model will not learn to stop; move {% endgeneration %} after it",
    "not written": "the template writes no special token after an answer, so the model will not "
    "learn to stop; use a template that ends each answer with one",
}
_MARKS = re.compile(f"[{BEGIN_MARK}{END_MARK}]")
Numbers = npt.NDArray[np.int64]
"""2 * id + 1 for each token that is trained on, 2 * id for each other."""
Labelled = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Token ids, and which of them are trained on."""


class Encoder:
    """Encodes an example as one number per token: 2 * id + 1 if it is trained on, else 2 * id.

    So a token store holds ids and labels. `notes` counts the examples by what a user may not expect
    of them.

    With `special_tokens`, names of special tokens in the text of examples mean these tokens;
    otherwise they are an error.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        special_tokens: Literal["refuse", "encode"] = "refuse",
    ) -> None:
        self._tokenizer, self.template = tokenizer, template
        self._encodes_special = special_tokens == "encode"
        special = tokenizer.special_tokens
        self._forbidden = re.compile(any_of([] if self._encodes_special else special))
        ends = [name for name, i in special.items() if i == tokenizer.eos_id]
        self._written_ends = tuple(ends if self._encodes_special else ())
        self.notes: Counter[str] = Counter()
        self._is_read: dict[tuple[str, str], bool] = {}
        """By role and key, as the first such message tells."""

    def encode(self, examples: Sequence[Example]) -> list[Numbers]:
        """Return the numbers of each example.

        The tokenizer encodes the texts of many examples on all cores. Raises DataError if a
        conversation has no template, or an example names a special token.
        """
        chats = [example for example in examples if isinstance(example, Conversation)]
        completions = [example for example in examples if isinstance(example, Completion)]
        rows = {
            Conversation: iter(self._conversations(chats) if chats else ()),
            Completion: iter(self._completions(completions) if completions else ()),
        }
        labelled = (next(rows[type(example)]) for example in examples)
        return [2 * ids + trained for ids, trained in labelled]

    def encode_prompt(self, question: Conversation) -> list[int]:
        """Return the token ids after which the model writes the next answer."""
        template = self._check(question)
        text = template.render(question, add_generation_prompt=True)
        return list(self._tokenizer.encode_special([text])[0].ids)

    def _completions(self, examples: Sequence[Completion]) -> Iterator[Labelled]:
        for example in examples:
            self._check_special(example)
        texts = [text for e in examples for text in (e.prompt, e.completion)]
        rows: Sequence[Sequence[int]] = (
            [encoded.ids for encoded in self._tokenizer.encode_special(texts)]
            if self._encodes_special
            else [ids.tolist() for ids in self._tokenizer.encode_batch(texts)]
        )
        for example, prompt, completion in zip(examples, rows[::2], rows[1::2], strict=True):
            prefix = with_begin(prompt, begin_ids=self._tokenizer.begin_ids)
            has_end = example.completion.rstrip().endswith(self._written_ends)
            end = [self._tokenizer.eos_id] if completion and not has_end else []
            ids = np.array([*prefix, *completion, *end], np.int64)
            yield ids, np.arange(len(ids)) >= len(prefix)

    def _conversations(self, examples: Sequence[Conversation]) -> Iterator[Labelled]:
        templates = [self._check(example) for example in examples]
        rendered = [t.divide(example) for t, example in zip(templates, examples, strict=True)]
        encoded = self._tokenizer.encode_special([text for text, _ in rendered])
        for template, example, text, (ids, ends) in zip(
            templates, examples, rendered, encoded, strict=True
        ):
            self.notes.update(self._notes(example, template=template, rendered=text))
            yield np.array(ids, np.int64), overlaps_spans(ends, spans=text.spans)

    def _notes(
        self, example: Conversation, *, template: ChatTemplate, rendered: Rendered
    ) -> Iterator[str]:
        """Yield what a user may not expect: null arguments, a missing end, keys that are unread."""
        if any(map(has_null_arguments, example.messages)):
            yield NULL_ARGUMENTS
        if (reason := template.missing_end(rendered)) is not None:
            yield MISSING_ENDS[reason]
        names = [*example.variables, *(["tools"] if example.tools else [])]
        keys = [("", name, None) for name in names] + [
            (message["role"], "reasoning_content" if key in REASONING_KEYS else key, number)
            for number, message in enumerate(example.messages)
            for key in message
            if key not in READ_HERE
        ]
        unread = set()
        for role, key, number in keys:
            if (role, key) not in self._is_read:
                without = _without(example, key, number=number)
                self._is_read[role, key] = template.reads(example, without=without)
            if not self._is_read[role, key]:
                unread.add(key)
        yield from (f"nothing reads the key {key!r}" for key in sorted(unread))

    def _check(self, example: Conversation) -> ChatTemplate:
        """Return the template; raise DataError without one, or for text that it may not have."""
        if self.template is None:
            rule = (
                "must name a Jinja file: examples have messages, and the tokenizer has no chat "
                "template"
            )
            raise DataError.at("chat_template", rule)
        if any(map(_MARKS.search, _texts_of(example))):
            raise DataError(
                f"{example.where}: messages must not contain the noncharacters U+FDD0 and U+FDD1, "
                f"which mark answers; remove them"
            )
        self._check_special(example)
        return (example.tools and self.template.with_tools) or self.template

    def _check_special(self, example: Example) -> None:
        for match in filter(None, map(self._forbidden.search, _texts_of(example))):
            raise DataError(
                f"{example.where}: text must not contain special tokens, got {match[0]!r}; "
                f'training.special_tokens_in_examples = "encode" reads them as tokens'
            )


def _texts_of(example: Example) -> Iterator[str]:
    if isinstance(example, Completion):
        return iter((example.prompt, example.completion))
    return strings_in([*example.messages, *(example.tools or ()), dict(example.variables)])


def is_answered(row: npt.NDArray[Any]) -> bool:
    """Return whether anything in the numbers of an example is trained on."""
    return bool((row[1:] & 1).any())  # the first token is never a label


def with_begin(ids: Sequence[int], *, begin_ids: Sequence[int]) -> list[int]:
    """Return the ids of a text after the tokenizer's `begin_ids`, unless it starts with them."""
    num = len(begin_ids)
    return [*ids] if list(ids[:num]) == list(begin_ids) else [*begin_ids, *ids]


def overlaps_spans(
    ends: Sequence[int], *, spans: Sequence[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Return which tokens have a character in one of the spans.

    A token starts where the token before it ends; tokens that share a character all include it.
    """
    stops = np.array(ends, np.int64)
    starts = np.minimum(np.concatenate([[0], stops])[:-1], stops - 1)
    overlaps = np.zeros(len(stops), np.bool_)
    for first, last in spans:
        overlaps |= (starts < last) & (stops > first)
    return overlaps


def _without(example: Conversation, key: str, *, number: int | None) -> Conversation:
    """Return a conversation without a key of a message, or without a variable."""
    if number is None:
        variables = {name: value for name, value in example.variables.items() if name != key}
        tools = None if key == "tools" else example.tools
        return example._replace(variables=variables, tools=tools)
    keys = REASONING_KEYS if key in REASONING_KEYS else (key,)
    messages = [*example.messages]
    messages[number] = {k: value for k, value in messages[number].items() if k not in keys}
    return example._replace(messages=messages)
