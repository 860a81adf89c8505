"""Chat templates: render a conversation as text, and find the parts of it that are trained on.

A template is a Jinja program that comes with a model. It is untrusted, so it runs in Jinja's
sandbox, where it cannot access Python's internals, read a file or change its input. Its time is
limited in the main thread of a process, its memory is not. It has the functions that transformers
provides, so the text is the same.

The loss is on the assistant's messages. A template may mark them by `{% generation %}` tags.
Without tags, they are found by prefixes: the model reads the text of the messages before an answer,
with the generation prompt, and has to write the rest of the text with the answer. This needs the
first text to be a prefix of the second. A template that renders earlier turns differently
once later ones follow (some drop the reasoning of all answers but the last) is an error.

Empty answers are not trained on, as they would only teach to end the turn, and neither are answers
with weight 0 (OpenAI's format) or train false (axolotl's).
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, Undefined, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchtitan.base.errors import DataError
from torchtitan.base.files import read_text, user_path
from torchtitan.base.log import plural
from torchtitan.data.text import any_of
from torchtitan.data.tokenizer import (
    BEGIN_OF_TEXT,
    BUILT_IN,
    END_OF_TEXT,
    Tokenizer,
    read_tokenizer_config,
    special_token,
)

Message = Mapping[str, Any]
# Unicode noncharacters: no text contains them
BEGIN_MARK, END_MARK = "\ufdd0", "\ufdd1"
TAGS = "{% generation %} and {% endgeneration %}"
PROBE = "an answer"
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Examples have it under the first two and the given one."""
CONTENT_KEYS = ("content", "tool_calls", *REASONING_KEYS)
# BOS separates role and content, so that no token is part of both
BUILT_IN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] + bos_token + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' + bos_token }}{% endif %}"
)
CHAT_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
"""File and folder of templates beside tokenizer.json."""
MAX_SECONDS = 20
"""Time for one conversation."""
TOKEN_VARIABLES = tuple(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class Conversation(NamedTuple):
    """Messages, the tools that they use, and their file and line for errors."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None
    where: str
    variables: Mapping[str, Any] = MappingProxyType({})
    """Further variables of the template, such as `enable_thinking`."""


class Rendered(NamedTuple):
    """A conversation as text, and start and end of each part that is trained on."""

    text: str
    spans: list[tuple[int, int]]


class GenerationTags(Extension):
    """Jinja extension that writes marks around `{% generation %}` blocks."""

    tags = {"generation"}  # noqa: RUF012, Jinja's protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.Output([nodes.TemplateData(mark)]).set_lineno(line)
            for mark in (BEGIN_MARK, END_MARK)
        )
        return [begin, *body, end]


class StrictUndefined(Undefined):
    """An undefined name. A template may test it, but writing it is an error.

    As in transformers, the content of a message that only calls tools is written as "".
    """

    def __str__(self) -> str:
        message = self._undefined_obj
        if self._undefined_name == "content" and isinstance(message, dict) and "role" in message:
            return ""
        self._fail_with_undefined_error()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML; json.dumps's `default` would call functions from the template
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


class ChatTemplate:
    """A compiled chat template.

    `origin` is where it was found, `variables` are the special tokens by role (bos_token, eos_token
    ...), `special` the names of all, `with_tools` is the template of conversations with tools, if
    it is another one. Raises DataError if the text is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        origin: str,
        variables: Mapping[str, str],
        special: Collection[str],
        with_tools: ChatTemplate | None = None,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            undefined=StrictUndefined,
            extensions=[GenerationTags, loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except Exception as error:  # of the parser, the compiler or Python
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            rule = f"{origin} must be valid Jinja, {line}{error}"
            raise DataError.at("chat_template", rule) from error
        self._has_tags = BEGIN_MARK in {text.data for text in tree.find_all(nodes.TemplateData)}
        self.source, self.origin, self.variables = source, origin, dict(variables)
        self.with_tools = with_tools
        self._special_at_start = re.compile(rf"\s*(?:{any_of(special)})")
        self._special_at_end = re.compile(rf"(?:{any_of(special)})(?=\s*\Z)")

    def render(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return the text that the model reads; raise DataError if the template fails."""
        text = self._render(
            conversation,
            num_messages=len(conversation.messages),
            add_generation_prompt=add_generation_prompt,
        )
        return text.replace(BEGIN_MARK, "").replace(END_MARK, "")

    def reads(self, conversation: Conversation, *, without: Conversation) -> bool:
        """Return whether the text of a conversation depends on what another one lacks."""
        try:
            return self.render(conversation) != self.render(without)
        except DataError:
            return True

    def missing_end(self, rendered: Rendered) -> Literal["outside tags", "not written"] | None:
        """Return why the last answer has no token that ends the turn; None if it has one.

        An answer may have several tagged parts, and the last one ends the turn.
        """
        for start, stop in rendered.spans[-1:]:
            if not self._special_at_end.search(rendered.text[start:stop]):
                follows = self._special_at_start.match(rendered.text, stop)
                return "outside tags" if self._has_tags and follows else "not written"
        return None

    def end_of_turn(self) -> str | None:
        """Return the special token that the template writes after an answer, None without one;
        raise DataError if the template fails on a question and an answer."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
        text = self.render(Conversation(turns, None, "to find the token that ends a turn"))
        match = self._special_at_start.match(text.rpartition(PROBE)[2])
        return match[0].strip() if match else None

    def divide(self, conversation: Conversation) -> Rendered:
        """Return the text and the parts to train on.

        A part ends with the special token that ends the turn, without following white space. Raises
        DataError if the template fails, or the parts cannot be found.
        """
        messages, where = conversation.messages, conversation.where
        text = self._render(conversation, num_messages=len(messages))
        if self._has_tags:
            rendered = _remove_marks(text)
            return Rendered(rendered.text, self._trained(rendered.spans, messages, where=where))
        spans = []
        for i in (i for i, message in enumerate(messages) if is_trained(message)):
            answered = self._render(conversation, num_messages=i + 1)
            prompt = self._prompt(conversation, number=i)
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise self._cannot_find(f"{where}: message {i + 1}")
            ending = self._special_at_end.search(answered, len(prompt))
            spans.append((len(prompt), ending.end() if ending else len(answered)))
        return Rendered(text, spans)

    def _prompt(self, conversation: Conversation, *, number: int) -> str:
        """Return the text before answer `number`.

        Many templates fail without messages. Before a first answer, the text ends with what the
        template writes for the next answer.
        """
        if number > 0:
            return self._render(conversation, num_messages=number, add_generation_prompt=True)
        answered = self._render(conversation, num_messages=1)
        prompted = self._render(conversation, num_messages=1, add_generation_prompt=True)
        start = prompted.removeprefix(answered)
        before, begin, _ = answered.partition(start) if start else ("", "", "")
        if not begin:
            opens = "message 1, with which the assistant opens the conversation"
            raise self._cannot_find(f"{conversation.where}: {opens}")
        return before + begin

    def _cannot_find(self, where: str) -> DataError:
        return DataError(
            f"{where}: cannot find the answer in the text of the chat template {self.origin}; put "
            f'{TAGS} around each answer in the template, or write training.train_on = "each"'
        )

    def _render(
        self, conversation: Conversation, *, num_messages: int, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of the first messages, with marks."""
        messages, where = conversation.messages, conversation.where
        try:
            with _limit_time():
                text = self._template.render(
                    messages=messages[:num_messages],
                    tools=conversation.tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **{**self.variables, **conversation.variables},
                )
            text.encode()  # raises for half of a surrogate pair
        except Exception as error:  # operations of a template can raise anything
            part = f" on the first {plural(num_messages, 'message')}"
            has_calls = any("tool_calls" in message for message in messages[:num_messages])
            hint = (
                "; it may not write tool_calls: choose another chat_template" if has_calls else ""
            )
            reason = str(error) or type(error).__name__
            raise DataError(
                f"{where}: the chat template {self.origin} fails"
                f"{part if num_messages < len(messages) else ''}: {reason}{hint}"
            ) from error
        return text

    def _trained(
        self, spans: list[tuple[int, int]], messages: Sequence[Message], *, where: str
    ) -> list[tuple[int, int]]:
        """Return the tagged parts to train on."""
        trained = [is_trained(message) for message in messages if message["role"] == "assistant"]
        if not all(trained):
            if len(trained) != len(spans):
                raise self._cannot_find(where)
            spans = [span for span, keep in zip(spans, trained, strict=True) if keep]
        return [(start, stop) for start, stop in spans if start < stop]


@contextmanager
def _limit_time() -> Iterator[None]:
    is_main = threading.current_thread() is threading.main_thread()  # only it gets signals
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0] > 0:  # a wait for data has its limit
        yield
        return

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"it took longer than {MAX_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_trained(message: Message) -> bool:
    """Return whether a message is an answer to train on."""
    has_content = any(message.get(key) for key in CONTENT_KEYS)
    is_left_out = message.get("weight") == 0 or message.get("train") is False
    return message["role"] == "assistant" and has_content and not is_left_out


def _remove_marks(text: str) -> Rendered:
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    while text:
        outside, mark, text = text.partition(BEGIN_MARK)
        inside, _, text = text.partition(END_MARK)
        inside = inside.replace(BEGIN_MARK, "")
        start = length + len(outside)
        length = start + len(inside)
        parts += [outside, inside]
        if mark:
            spans.append((start, length))
    return Rendered("".join(parts), spans)


def find_template(
    setting: str | None, *, tokenizer: Tokenizer, tokenizer_path: str
) -> ChatTemplate | None:
    """Return the template that the setting names or the tokenizer has, None without one.

    Hugging Face stores it beside tokenizer.json, in chat_template.jinja or, in older folders, in
    tokenizer_config.json, which also has the values of bos_token and eos_token. As there, the
    template `tool_use` is for conversations with tools. The built-in tokenizers have a simple
    template of their BOS and EOS tokens. Raises DataError if a file cannot be read or is not a
    template.
    """
    is_built_in = tokenizer_path in ("byte", *BUILT_IN)
    path = Path(tokenizer_path).expanduser()
    folder = path if path.is_dir() else path.parent
    config = {} if is_built_in else read_tokenizer_config(folder / "tokenizer_config.json")
    if setting is not None:
        sources, origin = {"default": _read(user_path(setting, key="chat_template"))}, setting
    elif is_built_in:
        sources, origin = {"default": BUILT_IN_TEMPLATE}, "of the built-in tokenizers"
    elif (file := folder / CHAT_TEMPLATE).exists():
        more = sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
        sources, origin = {**{f.stem: _read(f) for f in more}, "default": _read(file)}, str(file)
    else:
        sources, origin = _stored_templates(config), str(folder / "tokenizer_config.json")
    if "default" not in sources:
        return None
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    variables = {"eos_token": names.get(tokenizer.eos_id, END_OF_TEXT)}
    if BEGIN_OF_TEXT in tokenizer.special_tokens:
        variables["bos_token"] = BEGIN_OF_TEXT
    # null in the config: the tokenizer has no such token
    variables |= {key: special_token(config, key) or "" for key in TOKEN_VARIABLES if key in config}

    def build(name: str, with_tools: ChatTemplate | None = None) -> ChatTemplate | None:
        if name not in sources:
            return None
        return ChatTemplate(
            sources[name],
            origin=origin,
            variables=variables,
            special=tokenizer.special_tokens,
            with_tools=with_tools,
        )

    return build("default", build("tool_use"))


def _read(file: Path) -> str:
    try:
        # a byte order mark would be written into every conversation
        return read_text(file).removeprefix("\ufeff")
    except (OSError, UnicodeDecodeError) as error:
        rule = f"must name a Jinja file in UTF-8, cannot read {file}: {error}"
        raise DataError.at("chat_template", rule) from error


def _stored_templates(config: dict[str, Any]) -> dict[str, str]:
    """Return the templates in a tokenizer_config.json by name: one, or a list of named ones."""
    stored = config.get("chat_template")
    entries = stored if isinstance(stored, list) else [{"name": "default", "template": stored}]
    return {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("template"), str)
    }
