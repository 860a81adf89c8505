"""Tokenize examples, and label the tokens to train on.

The loss is on what the model has to write: the assistant's text and the token that ends its turn,
or a completion and the end-of-document token.

A conversation is tokenized as one text, as in inference, and a token is trained on if any of its
characters is the assistant's. In templates with a special token on both sides of an answer, no
token has characters of two turns. A prompt and its completion are tokenized separately: nothing is
between them, and in inference the model gets only the tokens of the prompt.

The name of a special token in a message would end a turn too early, so it is an error. In prompts
and completions, which no template renders, it is plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError
from torchtitan.data.text import any_of
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.finetune.chat import BEGIN_MARK, END_MARK, ChatTemplate, Conversation
from torchtitan.finetune.examples import Completion, Example, strings_in

Labelled = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]
"""Token ids, and which of them are trained on."""


class Encoder:
    """Encodes an example as one number per token: 2 * id + 1 if it is trained on, else 2 * id.

    So a token store holds ids and labels. `num_without_end` counts conversations whose tags leave
    out the token that ends the turn.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._forbidden = re.compile(any_of([*tokenizer.special_tokens, BEGIN_MARK, END_MARK]))
        self.num_without_end = 0

    def encode(self, examples: Sequence[Example]) -> list[npt.NDArray[np.int64] | None]:
        """Return the numbers of each example, None if nothing in it is trained on.

        The tokenizer encodes the texts of many examples on all cores.

        Raises:
            DataError: A conversation has no template, or a message names a special token.
        """
        chats = [example for example in examples if isinstance(example, Conversation)]
        completions = [example for example in examples if isinstance(example, Completion)]
        rows = {
            Conversation: iter(self._conversations(chats) if chats else ()),
            Completion: iter(self._completions(completions) if completions else ()),
        }
        labelled = (next(rows[type(example)]) for example in examples)
        # the first token is never a label
        return [2 * ids + trained if trained[1:].any() else None for ids, trained in labelled]

    def encode_prompt(self, question: Conversation) -> list[int]:
        """Return the token ids after which the model writes the next answer."""
        template = self._check(question)
        text = template.render(question, add_generation_prompt=True)
        return list(self._tokenizer.encode_special([text])[0].ids)

    def _completions(self, examples: Sequence[Completion]) -> Iterator[Labelled]:
        texts = [text for each in examples for text in (each.prompt, each.completion)]
        encoded = self._tokenizer.encode_batch(texts)
        for prompt, completion in zip(encoded[::2], encoded[1::2], strict=True):
            end = [self._tokenizer.eos_id] if len(completion) else []
            ids = np.concatenate([prompt, completion, np.array(end, np.int64)]).astype(np.int64)
            yield ids, np.arange(len(ids)) >= len(prompt)

    def _conversations(self, examples: Sequence[Conversation]) -> Iterator[Labelled]:
        (template, *_) = [self._check(example) for example in examples]
        rendered = [template.divide(example) for example in examples]
        encoded = self._tokenizer.encode_special([each.text for each in rendered])
        for text, (ids, ends) in zip(rendered, encoded, strict=True):
            self.num_without_end += template.lacks_end(text)
            yield np.array(ids, np.int64), overlaps_spans(ends, spans=text.spans)

    def _check(self, example: Conversation) -> ChatTemplate:
        """Return the template; raise DataError without one, or if a message names a token."""
        if self._template is None:
            rule = (
                f"must name a Jinja file: {example.where} has messages, and the tokenizer has no "
                f"chat template"
            )
            raise DataError.at("chat_template", rule)
        for text in strings_in([*example.messages, *(example.tools or ())]):
            if found := self._forbidden.search(text):
                raise DataError(
                    f"{example.where}: messages must not contain special tokens, which could end "
                    f"a turn, got {found[0]!r}"
                )
        return self._template


def overlaps_spans(
    ends: Sequence[int], *, spans: Sequence[tuple[int, int]]
) -> npt.NDArray[np.bool_]:
    """Return which tokens have a character in one of the spans.

    Args:
        ends: Where each token ends. It starts where the token before it ends; tokens that share a
            character all include it.
        spans: Start and end of each span.
    """
    stops = np.array(ends, np.int64)
    starts = np.minimum(np.concatenate([[0], stops])[:-1], stops - 1)
    found = np.zeros(len(stops), np.bool_)
    for first, last in spans:
        found |= (starts < last) & (stops > first)
    return found
