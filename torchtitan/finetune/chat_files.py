"""Find the chat template of a job: the one that it names, else the one beside the tokenizer.

Hugging Face keeps it beside `tokenizer.json`, in `chat_template.jinja` or, in older folders, in
`tokenizer_config.json`, which also has the values of `bos_token` and `eos_token`. The built-in
tokenizers have only begin and end tokens, and a plain template made of these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.data.files import user_path
from torchtitan.data.tokenizer import (
    BEGIN_OF_TEXT,
    BUILT_IN,
    END_OF_TEXT,
    Tokenizer,
    read_tokenizer_config,
    special_token,
)
from torchtitan.finetune.chat import MAX_CHARS, ChatTemplate

# the begin token separates role and words, so no token is part of both
PLAIN = (
    "{% for message in messages %}"
    "{{ message['role'] + bos_token + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant' + bos_token }}{% endif %}"
)
ROLES_OF_TOKENS = tuple(
    f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def find_template(
    setting: str | None, *, tokenizer: Tokenizer, tokenizer_path: str
) -> ChatTemplate | None:
    """Return the template that the setting names, else the tokenizer's own; None: it has none.

    Raises DataError for a file that cannot be read or is not a template.
    """
    built_in = tokenizer_path in ("byte", *BUILT_IN)
    path = Path(tokenizer_path).expanduser()
    folder = path if path.is_dir() else path.parent
    config = {} if built_in else read_tokenizer_config(folder / "tokenizer_config.json")
    if setting is not None:
        source, origin = _read(user_path(setting, key="chat_template")), setting
    elif built_in:
        source, origin = PLAIN, "of the built-in tokenizers"
    elif (file := folder / "chat_template.jinja").exists():
        source, origin = _read(file), str(file)
    elif (stored := _stored(config)) is not None:
        source, origin = stored, str(folder / "tokenizer_config.json")
    else:
        return None
    return ChatTemplate(
        source,
        origin=origin,
        variables=_variables(config, tokenizer),
        special=tokenizer.special_tokens,
    )


def _read(file: Path) -> str:
    try:
        # sig: a byte order mark would be written into every conversation
        with file.open(encoding="utf-8-sig") as opened:
            return opened.read(MAX_CHARS + 1)
    except OSError as error:
        rule = f"must name a Jinja file, cannot read {file}: {error.strerror}"
        raise DataError.at("chat_template", rule) from error
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {file} must be UTF-8: {error}") from error


def _stored(config: dict[str, Any]) -> str | None:
    stored = config.get("chat_template")
    if isinstance(stored, list):
        # several with names: [{"name": "default", "template": ...}, ...]
        named = {one.get("name"): one.get("template") for one in stored if isinstance(one, dict)}
        stored = named.get("default")
    return stored if isinstance(stored, str) else None


def _variables(config: dict[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    names = {i: name for name, i in tokenizer.special_tokens.items()}
    variables = {"eos_token": names.get(tokenizer.eos_id, END_OF_TEXT)}
    if BEGIN_OF_TEXT in tokenizer.special_tokens:
        variables["bos_token"] = BEGIN_OF_TEXT
    # null: the tokenizer has none
    given = {role: special_token(config, role) or "" for role in ROLES_OF_TOKENS if role in config}
    return {**variables, **given}
