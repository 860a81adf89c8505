"""Chat templates: a conversation as the text that a model reads, and which parts of it are learnt.

A template is a Jinja program that comes with a model. Strangers wrote it, so it runs in Jinja's
sandbox, where it can neither reach Python's internals nor change its input, and that in a child
process with bounded time and memory (`data/foreign.py`). It may use what `transformers` gives it,
so the text is the same.

The loss is on what the assistant wrote. A template may mark that by `{% generation %}` tags. Most
do not; then prefixes tell. The text of the conversation before an answer, with the generation
prompt, is what the model gets when it answers; whatever the text with the answer has beyond that is
what the model must write. This holds only if the first text is a prefix of the second. A template
that writes earlier turns differently once later ones follow (some drop the reasoning of all answers
but the last) is refused.

Not every answer is learnt: an empty one would only teach to end the turn, and one of weight 0, as
in OpenAI's format, is there for what comes after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.data.foreign import ForeignError, Limits, Loaded, Program
from torchtitan.data.text import any_of

Message = Mapping[str, Any]

# noncharacters of Unicode: no text holds them
BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"


MARKS = "{% generation %} and {% endgeneration %}"
PROBE = "an answer"
SAYS = ("content", "tool_calls", "reasoning_content", "thinking")
# a conversation takes about a millisecond
LIMITS = Limits(seconds=10, gib=1)
MAX_CHARS = 1 << 26


class Conversation(NamedTuple):
    """Messages, the tools that they refer to, and file and line for errors."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    where: str


class _Part(NamedTuple):
    """The first messages of a conversation; `asks`: then the generation prompt."""

    conversation: Conversation
    num_messages: int
    asks: bool


class Rendered(NamedTuple):
    """A conversation as text, and begin and end of each part that is learnt."""

    text: str
    spans: list[tuple[int, int]]


class GenerationMarks(Extension):
    """`{% generation %}` to `{% endgeneration %}`: a mark before and after what is inside."""

    tags = {"generation"}  # noqa: RUF012, Jinja's protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse from the tag to its end."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_written(BEGIN_MARK, line), *body, _written(END_MARK, line)]


def _written(text: str, line: int) -> nodes.Node:
    return nodes.Output([nodes.TemplateData(text)]).set_lineno(line)


class LoudUndefined(Undefined):
    """A name without a value: a template may test it, but writing it is an error."""

    def __str__(self) -> NoReturn:
        self._fail_with_undefined_error()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own escapes HTML
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=LoudUndefined,
        extensions=[GenerationMarks, loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def load_template(source: bytes) -> Loaded:
    """Return what renders a template, and whether it has generation marks."""
    environment, text = _environment(), source.decode()
    try:
        tree = environment.parse(text)
        template = environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error

    def render(variables: Mapping[str, Any]) -> str:
        written = template.render(variables)
        if len(written) > MAX_CHARS:
            raise ValueError(
                f"it writes {len(written)} characters, at most {MAX_CHARS} are allowed"
            )
        written.encode()  # half of a surrogate pair is an error
        return written

    return render, any(data.data == BEGIN_MARK for data in tree.find_all(nodes.TemplateData))


class ChatTemplate:
    """A template that is well-formed.

    Args:
        source: the Jinja text.
        origin: where it comes from, for messages.
        variables: the special tokens by role: bos_token, eos_token ...
        special: the names of all special tokens.
        trusted: it came with this package.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str,
        variables: Mapping[str, str],
        special: Collection[str],
        trusted: bool = False,
    ) -> None:
        try:
            self._program = Program(
                f"{__name__}:load_template", source.encode(), limits=LIMITS, trusted=trusted
            )
        except ForeignError as error:
            rule = f"{origin} must be valid Jinja, {error}; mend it, or name another"
            raise DataError.at("chat_template", rule) from error
        self.source, self.origin, self.variables = source, origin, dict(variables)
        self._special = re.compile(rf"\s*(?:{any_of(special)})")
        self._ending = re.compile(rf"(?:{any_of(special)})(?=\s*\Z)")

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return the text that the model reads; raise DataError if the template fails."""
        part = _Part(conversation, len(conversation.messages), add_generation_prompt)
        (marked,) = self._run([part])
        return marked.replace(BEGIN_MARK, "").replace(END_MARK, "")

    def end_of_turn(self) -> str | None:
        """Return the special token that the template writes after an answer; None: it writes none.

        Raises DataError if it fails on a question and an answer.
        """
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        text = self.render(Conversation(turns, None, "to find the token that ends an answer"))
        found = self._special.match(text.rpartition(PROBE)[2])
        return found[0].strip() if found else None

    def conversations(self, conversations: Sequence[Conversation]) -> list[Rendered]:
        """Return their texts and the parts to learn; raise DataError if these are unclear.

        A part ends with the special token that ends the turn, without the white space that some
        templates write after it. Many at once cost less.
        """
        # the whole; for each answer to learn, the text that asks for it, and the text with it
        parts = [
            [
                _Part(conversation, len(conversation.messages), False),
                *(
                    _Part(conversation, i + answered, not answered)
                    for i, message in enumerate(conversation.messages)
                    if is_due(message) and not self._program.about
                    for answered in (0, 1)
                ),
            ]
            for conversation in conversations
        ]
        texts = iter(self._run([part for each in parts for part in each]))
        return [
            self._divide(conversation, [*islice(texts, len(each))])
            for conversation, each in zip(conversations, parts, strict=True)
        ]

    def _run(self, parts: Sequence[_Part]) -> list[str]:
        jobs = [
            {
                "messages": part.conversation.messages[: part.num_messages],
                "tools": part.conversation.tools,
                "documents": None,
                "add_generation_prompt": part.asks,
                **self.variables,
            }
            for part in parts
        ]
        try:
            return self._program.run(jobs)
        except ForeignError as error:
            (messages, _, where), number, asks = parts[error.index]
            if number < len(messages):
                asked = f"the answer of message {number + asks} {'begins' if asks else 'ends'}"
                raise DataError(
                    f"{where}: to find where {asked}, the first {amount(number, 'message')} "
                    f"must be rendered alone, but there the chat template {self.origin} fails: "
                    f"{error}; put the message that the template needs before it, or put {MARKS} "
                    f"around the assistant's part in the template"
                ) from error
            raise DataError(
                f"{where}: the chat template {self.origin} fails: {error}; "
                f"mend the messages or the template"
            ) from error

    def _divide(self, conversation: Conversation, texts: Sequence[str]) -> Rendered:
        """Return text and parts to learn of a conversation, given the texts of its parts."""
        messages, _, where = conversation
        whole, *texts = texts
        if self._program.about:
            marked = _unmarked(whole)
            return Rendered(marked.text, self._due(marked.spans, messages, where=where))
        due = [i for i, message in enumerate(messages) if is_due(message)]
        spans = []
        for i, given, answered in zip(due, texts[::2], texts[1::2], strict=True):
            if not (answered.startswith(given) and whole.startswith(answered)):
                plain = self.render(conversation._replace(messages=messages[:i])) if i else ""
                why = _difference(plain, given, answered)
                raise DataError(
                    f"{where}: cannot find where the answer of message {i + 1} begins and ends in "
                    f"the text of the chat template {self.origin}, {why} put {MARKS} around the "
                    f"assistant's part in the template"
                )
            ending = self._ending.search(answered, len(given))
            spans.append((len(given), ending.end() if ending else len(answered)))
        return Rendered(whole, spans)

    def _due(
        self, spans: list[tuple[int, int]], messages: Sequence[Message], *, where: str
    ) -> list[tuple[int, int]]:
        """Return the marked parts that are to be learnt."""
        due = [is_due(message) for message in messages if message["role"] == "assistant"]
        if not all(due):
            if len(due) != len(spans):
                raise DataError(
                    f"{where}: cannot find the part of an answer that is empty or has weight 0, "
                    f"which is not learnt: the chat template {self.origin} marks "
                    f"{amount(len(spans), 'part')} for {amount(len(due), 'answer')}; put one pair "
                    f"of {MARKS} around each answer"
                )
            spans = [span for span, learnt in zip(spans, due, strict=True) if learnt]
        return [(start, stop) for start, stop in spans if start < stop]

    def leaves_out_end(self, rendered: Rendered) -> bool:
        """Return whether the token that ends an answer is outside the template's marks."""
        return any(
            self._special.match(rendered.text, stop) and not self._ending.search(part)
            for start, stop in rendered.spans
            for part in [rendered.text[start:stop]]
        )


def is_due(message: Message) -> bool:
    """Return whether a message is an answer to learn."""
    says = any(message.get(key) for key in SAYS)
    return message["role"] == "assistant" and says and message.get("weight") != 0


def _difference(plain: str, given: str, answered: str) -> str:
    """Say why the text that asks for an answer is not a prefix of the text with it.

    `plain` is the text before the answer, `given` the same with the generation prompt.
    """
    pairs = enumerate(zip(given, answered, strict=False))
    common = next((i for i, (one, other) in pairs if one != other), len(answered))
    if common < len(given) and given.startswith(plain) and common >= len(plain):
        return (
            f"whose generation prompt writes {given[common:]!r}, but the text of the answer does "
            f"not begin with that; let it begin so, or"
        )
    return "which writes earlier messages differently once later ones follow;"


def _unmarked(text: str) -> Rendered:
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    while text:
        outside, begin, text = text.partition(BEGIN_MARK)
        inside, _, text = text.partition(END_MARK)
        inside = inside.replace(BEGIN_MARK, "")
        start = length + len(outside)
        length = start + len(inside)
        parts += [outside, inside]
        if begin:
            spans.append((start, length))
    return Rendered("".join(parts), spans)
