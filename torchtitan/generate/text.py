"""Generate text: continue prompts or answer chats, at once or streamed.

Streamed pieces joined together equal the text that is returned at once. A character may take
several tokens, so a piece is held back until its last character is complete.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from torchtitan.base.errors import ConfigError
from torchtitan.data.text import check_characters
from torchtitan.data.tokenizer import Tokenizer
from torchtitan.finetune.chat import ChatTemplate, Conversation, Message
from torchtitan.finetune.encoder import Encoder, with_begin
from torchtitan.finetune.examples import parse_example
from torchtitan.generate.generator import Generator
from torchtitan.generate.sampling import Sampling, draw, generate

if TYPE_CHECKING:
    from typing_extensions import Unpack

BATCH_SIZE = 8
REPLACEMENT = "\ufffd"
"""Decoded text of an incomplete character."""


def complete(
    generator: Generator,
    prompts: Sequence[str],
    *,
    special: bool = False,
    batch_size: int = BATCH_SIZE,
    **sampling: Unpack[Sampling],
) -> list[str]:
    """Return each prompt with its continuation.

    An empty prompt starts a new document. With `special`, names of special tokens in a prompt are
    these tokens, not plain text. `batch_size` prompts are continued together. Raises UserError if a
    prompt or setting is invalid.
    """
    ids = _encode(generator, prompts, special=special)
    new = _continue(generator, ids, generator.stop_ids, batch_size, sampling)
    # decoded together: a tokenizer may decode the first token of a text differently
    return [
        generator.tokenizer.decode(_visible(generator, prompt) + continuation)
        for prompt, continuation in zip(ids, new, strict=True)
    ]


def answer(
    generator: Generator,
    chats: Sequence[Sequence[Message]],
    *,
    batch_size: int = BATCH_SIZE,
    **sampling: Unpack[Sampling],
) -> list[str]:
    """Return the assistant's next message in each chat.

    `chats` are lists of messages such as `{"role": "user", "content": "Hi"}`. Raises UserError if a
    message or setting is invalid, or the model has no chat template.
    """
    ids, stop_ids = encode_chats(generator, chats)
    new = _continue(generator, ids, stop_ids, batch_size, sampling)
    return [generator.tokenizer.decode(continuation) for continuation in new]


def stream_tokens(
    generator: Generator,
    ids: Sequence[int],
    stop_ids: Collection[int],
    **sampling: Unpack[Sampling],
) -> Iterator[str]:
    """Yield the text of the tokens that continue `ids`, in pieces."""
    decoder = StreamDecoder(generator.tokenizer)
    for _, token in draw(generator.model, [ids], stop_ids=stop_ids, **sampling):
        if token not in stop_ids and (text := decoder.add([token])):
            yield text
    if text := decoder.flush():
        yield text


class StreamDecoder:
    """Decodes tokens one by one.

    Tokens of incomplete characters are held back. Further tokens are decoded together with those
    before them, since a tokenizer may decode the first token of a text differently. The pieces
    joined together equal the text of all tokens, except that SentencePiece tokenizers replace valid
    bytes just before invalid ones if they are decoded together.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._before: list[int] = []
        self._held: list[int] = []

    def add(self, ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete."""
        self._held += ids
        text = self.flush()
        if text.endswith(REPLACEMENT):
            return ""
        if text:
            self._before, self._held = self._held, []
        return text

    def flush(self) -> str:
        """Return the text of the held tokens, with U+FFFD for an incomplete character."""
        return self._decode(self._before + self._held)[len(self._decode(self._before)) :]


def _encode(generator: Generator, prompts: Sequence[str], *, special: bool) -> list[list[int]]:
    for number, prompt in enumerate(prompts, start=1):
        check_characters(prompt, where=f"prompt {number}")
    tokenizer = generator.tokenizer
    if special:
        rows = [list(encoded.ids) for encoded in tokenizer.encode_special(prompts)]
    else:
        rows = [tokenizer.encode(prompt) for prompt in prompts]
    rows = [with_begin(row, begin_ids=generator.begin_ids) for row in rows]
    return [row or [tokenizer.eos_id] for row in rows]


def _visible(generator: Generator, ids: Sequence[int]) -> list[int]:
    """Return the tokens of a prompt without begin tokens and the ends of documents."""
    hidden = {generator.tokenizer.eos_id, *generator.begin_ids}
    return [i for i in ids if i not in hidden]


def get_template(generator: Generator) -> ChatTemplate:
    """Return the chat template; raise ConfigError without one."""
    if generator.template is None:
        raise ConfigError("a chat needs a chat template; name a file by --chat_template")
    return generator.template


def encode_chats(
    generator: Generator, chats: Sequence[Sequence[Message]]
) -> tuple[list[list[int]], frozenset[int]]:
    """Return the token ids before each answer, and the tokens that end an answer; raise UserError
    if a message is invalid, or the model has no chat template."""
    encoder, ids = Encoder(generator.tokenizer, get_template(generator)), []
    for number, chat in enumerate(chats, start=1):
        where = f"prompt {number}" if len(chats) > 1 else "the chat"
        question = parse_example({"messages": [*chat]}, where=where)
        assert isinstance(question, Conversation)
        ids.append(encoder.encode_prompt(question))
    return ids, generator.answer_stop_ids()


def _continue(
    generator: Generator,
    prompts: Sequence[list[int]],
    stop_ids: frozenset[int],
    batch_size: int,
    sampling: Sampling,
) -> list[list[int]]:
    """Return the new tokens of each prompt without the stop token."""
    continued = []
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        continued += generate(generator.model, batch, stop_ids=stop_ids, **sampling)
    return [new[:-1] if new[-1] in stop_ids else new for new in continued]
