"""Chat templates: a conversation as the text that a model reads, and which parts of it are learnt.

A template is a Jinja program that comes with a model. Strangers wrote it, so it runs in Jinja's
sandbox: it cannot reach Python's internals, read a file or change its input. Its time and memory
are not bounded. It may use what `transformers` gives it, so the text is the same.

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
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan.base.errors import DataError
from torchtitan.base.log import plural
from torchtitan.data.text import any_of

Message = Mapping[str, Any]

# noncharacters of Unicode: no text holds them
BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"
MARKS = "{% generation %} and {% endgeneration %}"
PROBE = "an answer"
SAYS = ("content", "tool_calls", "reasoning_content", "thinking")
MAX_CHARS = 1 << 20
"""Characters of a template; those of known models have fewer than 20,000."""


class Conversation(NamedTuple):
    """Messages, the tools that they refer to, and file and line for errors."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    where: str


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


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML; other options of json.dumps would call functions past the sandbox
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


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


class ChatTemplate:
    """A template that is well-formed.

    Args:
        source: the Jinja text.
        origin: where it comes from, for messages.
        variables: the special tokens by role: bos_token, eos_token ...
        special: the names of all special tokens.
    """

    def __init__(
        self, source: str, *, origin: str, variables: Mapping[str, str], special: Collection[str]
    ) -> None:
        if len(source) > MAX_CHARS:
            rule = f"{origin} must be a chat template of at most {MAX_CHARS} characters"
            raise DataError.at("chat_template", rule)
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except Exception as error:  # of the parser, the compiler or Python
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            rule = f"{origin} must be valid Jinja, {line}{error}; mend it, or name another"
            raise DataError.at("chat_template", rule) from error
        texts = tree.find_all(nodes.TemplateData)
        self._has_marks = any(text.data == BEGIN_MARK for text in texts)
        self.source, self.origin, self.variables = source, origin, dict(variables)
        self._special = re.compile(rf"\s*(?:{any_of(special)})")
        self._ending = re.compile(rf"(?:{any_of(special)})(?=\s*\Z)")

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return the text that the model reads; raise DataError if the template fails."""
        number = len(conversation.messages)
        marked = self._render(conversation, num_messages=number, asks=add_generation_prompt)
        return marked.replace(BEGIN_MARK, "").replace(END_MARK, "")

    def end_of_turn(self) -> str | None:
        """Return the special token that the template writes after an answer; None: it writes none.

        Raises DataError if it fails on a question and an answer.
        """
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        text = self.render(Conversation(turns, None, "to find the token that ends an answer"))
        found = self._special.match(text.rpartition(PROBE)[2])
        return found[0].strip() if found else None

    def divide(self, conversation: Conversation) -> Rendered:
        """Return the text and the parts to learn; raise DataError if these are unclear.

        A part ends with the special token that ends the turn, without the white space that some
        templates write after it.
        """
        messages, _, where = conversation
        whole = self._render(conversation, num_messages=len(messages), asks=False)
        if self._has_marks:
            marked = _unmarked(whole)
            return Rendered(marked.text, self._due(marked.spans, messages, where=where))
        spans = []
        for i in (i for i, message in enumerate(messages) if is_due(message)):
            given = self._render(conversation, num_messages=i, asks=True)
            answered = self._render(conversation, num_messages=i + 1, asks=False)
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

    def _render(self, conversation: Conversation, *, num_messages: int, asks: bool) -> str:
        """Return the text of the first messages; `asks`: with the generation prompt after them."""
        messages, tools, where = conversation
        try:
            text = self._template.render(
                messages=messages[:num_messages],
                tools=tools,
                documents=None,
                add_generation_prompt=asks,
                **self.variables,
            )
            text.encode()  # half of a surrogate pair is an error
        except Exception as error:  # whatever the template's operations raise
            reason = str(error) or type(error).__name__
            if num_messages == len(messages):
                raise DataError(
                    f"{where}: the chat template {self.origin} fails: {reason}; "
                    f"mend the messages or the template"
                ) from error
            asked = f"the answer of message {num_messages + asks} {'begins' if asks else 'ends'}"
            raise DataError(
                f"{where}: to find where {asked}, the first {plural(num_messages, 'message')} "
                f"must be rendered alone, but there the chat template {self.origin} fails: "
                f"{reason}; put the message that the template needs before it, or put {MARKS} "
                f"around the assistant's part in the template"
            ) from error
        return text

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
                    f"{plural(len(spans), 'part')} for {plural(len(due), 'answer')}; put one pair "
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
