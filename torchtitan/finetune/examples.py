"""Examples to fine-tune on: read from files of rows, and made tokens with or without loss.

What a row may be, and what is learnt of it, is in `shapes.py`. The loss is on what the model has to
write: the assistant's words and the token that ends its turn; the completion and the
end-of-document token. An empty answer is not learnt, nor is one with `"weight": 0`.

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
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError
from torchtitan.data.readers import READERS, read_rows, suffix_of
from torchtitan.data.text import any_of
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.finetune.chat import BEGIN_MARK, END_MARK, ChatTemplate, Conversation
from torchtitan.finetune.shapes import Continuation, Example, parse_example, strings_in

Marked = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]


def read_examples(file: Path) -> Iterator[Example]:
    """Yield the examples of a file; a DataError names the place of a wrong one."""
    check_has_rows(file)
    for value, where in read_rows(file):
        yield parse_example(value, where=where)


def check_has_rows(file: Path) -> None:
    """Raise DataError if the suffix of a file is not of a format with rows."""
    if suffix_of(file) not in READERS:
        raise DataError(
            f"examples must be rows ({', '.join(READERS)}), got {file}; to read text set "
            f'dataset = "files"'
        )


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

        The tokenizer encodes the texts of many examples on all cores.
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
            raise DataError.at("chat_template", rule)
        for text in strings_in([*example.messages, *(example.tools or ())]):
            if found := self._forbidden.search(text):
                raise DataError(
                    f"{example.where}: no message may spell a special token, which could end its "
                    f"turn, found {found[0]!r}; remove it, or write it differently"
                )
        return self._template

    def _conversations(self, examples: Sequence[Conversation]) -> Iterator[Marked]:
        (template, *_) = [self._checked(example) for example in examples]
        rendered = [template.divide(example) for example in examples]
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
