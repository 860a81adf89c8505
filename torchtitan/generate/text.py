"""From prompts to text: continued, or answered in a chat; whole, or piece by piece as it is drawn.

The pieces that are streamed are together the text that is returned whole. A character may take
several tokens, so a piece waits until its last character is there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from torchtitan.base.errors import ConfigError
from torchtitan.data.text import check_characters
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.finetune.chat import ChatTemplate, Conversation, Message
from torchtitan.finetune.examples import Encoder
from torchtitan.finetune.shapes import parse_example
from torchtitan.generate.generator import Generator
from torchtitan.generate.sampling import Sampling, draw, generate

if TYPE_CHECKING:
    from typing_extensions import Unpack

BATCH_SIZE = 8
CUT = "\ufffd"
"""What a tokenizer writes for a part of a character."""


def complete(
    generator: Generator,
    prompts: Sequence[str],
    *,
    special: bool = False,
    batch_size: int = BATCH_SIZE,
    **sampling: Unpack[Sampling],
) -> list[str]:
    """Return each prompt with its continuation, `batch_size` prompts at a time.

    `special`: the names of special tokens in a prompt mean these tokens, else they are plain text.
    An empty prompt begins a new document.
    """
    ids = _prompt_ids(generator, prompts, special=special)
    new = _continued(generator, ids, generator.stop_ids, batch_size, sampling)
    # decoded together: a tokenizer may write the first token of a text differently
    return [
        generator.tokenizer.decode(_shown(generator, prompt) + rest)
        for prompt, rest in zip(ids, new, strict=True)
    ]


def stream(
    generator: Generator, prompt: str, *, special: bool = False, **sampling: Unpack[Sampling]
) -> Iterator[str]:
    """Yield a prompt, then its continuation as it is drawn: together the text of `complete`."""
    [ids] = _prompt_ids(generator, [prompt], special=special)
    shown = _shown(generator, ids)
    return stream_tokens(generator, ids, generator.stop_ids, shown=shown, **sampling)


def answer(
    generator: Generator,
    chats: Sequence[Sequence[Message]],
    *,
    batch_size: int = BATCH_SIZE,
    **sampling: Unpack[Sampling],
) -> list[str]:
    """Return what the assistant says next in each chat, `batch_size` chats at a time.

    A chat is a list of messages, `{"role": "user", "content": "Hi"}`.
    """
    ids, stop_ids = encode_chats(generator, chats)
    new = _continued(generator, ids, stop_ids, batch_size, sampling)
    return [generator.tokenizer.decode(rest) for rest in new]


def stream_answer(
    generator: Generator, chat: Sequence[Message], **sampling: Unpack[Sampling]
) -> Iterator[str]:
    """Yield the answer to a chat as it is drawn: together the text of `answer`."""
    [ids], stop_ids = encode_chats(generator, [chat])
    return stream_tokens(generator, ids, stop_ids, **sampling)


def stream_tokens(
    generator: Generator,
    ids: Sequence[int],
    stop_ids: Collection[int],
    *,
    shown: Sequence[int] = (),
    **sampling: Unpack[Sampling],
) -> Iterator[str]:
    """Yield the text of the tokens in `shown`, then of those that are drawn to follow `ids`."""
    pieces = Pieces(generator.tokenizer)
    if begun := pieces.add(shown):
        yield begun
    for _, token in draw(generator.model, [ids], stop_ids=stop_ids, **sampling):
        if token not in stop_ids and (piece := pieces.add([token])):
            yield piece
    if cut := pieces.rest():
        yield cut


class Pieces:
    """Turns tokens into text as they come.

    Tokens that make no whole characters yet are kept. The rest is decoded behind the tokens before
    it, since a tokenizer may write the first token of a text differently. The pieces are the text
    of all tokens, but where a tokenizer of SentencePiece draws single bytes that are no UTF-8: the
    whole text then has U+FFFD in place of good bytes just before them, too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._before: list[int] = []
        self._kept: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """Return the text that these tokens make whole."""
        self._kept += ids
        text = self.rest()
        if text.endswith(CUT):
            return ""
        if text:
            self._before, self._kept = self._kept, []
        return text

    def rest(self) -> str:
        """Return the text of the tokens that are kept, a part of a character as U+FFFD."""
        return self._decode(self._before + self._kept)[len(self._decode(self._before)) :]


def _prompt_ids(generator: Generator, prompts: Sequence[str], *, special: bool) -> list[list[int]]:
    for number, prompt in enumerate(prompts, start=1):
        check_characters(prompt, where=f"prompt {number}")
    tokenizer = generator.tokenizer
    named = tokenizer.encode_special
    encode = (lambda p: list(named([p])[0].ids)) if special else tokenizer.encode
    return [encode(prompt) or [tokenizer.eos_id] for prompt in prompts]


def _shown(generator: Generator, prompt_ids: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt that are written: not the ends of documents."""
    return [i for i in prompt_ids if i != generator.tokenizer.eos_id]


def check_chats(generator: Generator) -> ChatTemplate:
    """Return the chat template; raise ConfigError if there is none."""
    if generator.template is None:
        raise ConfigError(
            "a chat needs a chat template, and there is none beside the tokenizer; put one there, "
            "as chat_template.jinja, or give a Jinja file with --chat_template"
        )
    return generator.template


def encode_chats(
    generator: Generator, chats: Sequence[Sequence[Message]]
) -> tuple[list[list[int]], frozenset[int]]:
    """Return the tokens that ask for the answer to each chat, and those that end an answer.

    Raises:
        UserError: A message is wrong or spells a special token, or there is no chat template.
    """
    encoder, ids = Encoder(generator.tokenizer, check_chats(generator)), []
    for number, chat in enumerate(chats, start=1):
        where = f"prompt {number}" if len(chats) > 1 else "the chat"
        question = parse_example({"messages": [*chat]}, where=where)
        assert isinstance(question, Conversation)
        ids.append(encoder.ask(question))
    return ids, generator.answer_stop_ids()


def _continued(
    generator: Generator,
    prompts: Sequence[list[int]],
    stop_ids: frozenset[int],
    batch_size: int,
    sampling: Sampling,
) -> list[list[int]]:
    """Return the new tokens of each prompt, without the one that ended it."""
    starts = range(0, len(prompts), batch_size)
    batches = (prompts[start : start + batch_size] for start in starts)
    found = [
        new
        for batch in batches
        for new in generate(generator.model, batch, stop_ids=stop_ids, **sampling)
    ]
    return [new[:-1] if new[-1] in stop_ids else new for new in found]
