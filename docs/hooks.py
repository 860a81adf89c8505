"""What `mkdocs build` adds to docs/: the reference, CONTRIBUTING.md, benchmarks/, linked sources.

The reference is generated from the code, so it cannot differ from it: settings from the fields of
`Config` with their docstrings, verbs from their `--help`, Python by mkdocstrings.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import sys
from contextlib import redirect_stdout, suppress
from dataclasses import MISSING, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from torchtitan.config.help import docstring_of, type_text  # noqa: E402
from torchtitan.config.settings import Key, keys, literal, sections  # noqa: E402
from torchtitan.job import Config  # noqa: E402
from torchtitan.tools.command import VERBS  # noqa: E402

LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")
PYTHON = {
    "Functions": [
        "torchtitan.api.load_config",
        "torchtitan.api.train",
        "torchtitan.api.load_model",
        "torchtitan.api.load_tokenizer",
        "torchtitan.api.load_generator",
        "torchtitan.api.generate",
        "torchtitan.api.chat",
    ],
    "Types": ["torchtitan.api.Result", "torchtitan.base.errors.UserError"],
    "Protocols of own code": [
        "torchtitan.callbacks.Callbacks",
        "torchtitan.metrics.sinks.Sink",
        "torchtitan.models.spec.ModelSpec",
        "torchtitan.models.interface.LanguageModel",
    ],
}
SUBVERBS = {
    "plan": ("memory", "layout", "step", "traffic", "schedule"),
    "convert": ("to-hf", "from-hf", "from-torch", "average"),
    "compare": ("layouts", "runs"),
}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, and each file outside docs/ that a page links to."""
    pages = {
        "reference/settings.md": settings_page(),
        "reference/verbs.md": verbs_page(),
        "reference/python.md": python_page(),
        "contributing.md": (ROOT / "CONTRIBUTING.md").read_text(),
        **{f"benchmarks/{p.name}": p.read_text() for p in ROOT.glob("benchmarks/*.md")},
    }
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    sources = set()
    for file in list(files):
        if file.src_uri.endswith(".md"):
            targets = (match[1] for match in LINK.finditer(file.content_string))
            sources |= {source(origin(file.src_uri), target) for target in targets}
    for path in sorted(filter(None, sources)):
        text = (ROOT / path).read_text()
        files.append(File.generated(config, f"source/{path}.txt", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links between files of the repository into links between files of the site."""
    uri = page.file.src_uri

    def to_site(match: re.Match[str]) -> str:
        target = resolve(origin(uri), match[1])
        if source(origin(uri), match[1]):
            target = f"source/{target}.txt"
        target = {"CONTRIBUTING.md": "contributing.md"}.get(target, target.removeprefix("docs/"))
        relative = posixpath.relpath(target, posixpath.dirname(uri) or ".")
        return f"]({relative}{match[2] or ''})"

    return markdown if uri.startswith("reference/") else LINK.sub(to_site, markdown)


def origin(uri: str) -> str:
    """Return the path in the repository of a page of the site."""
    if uri == "contributing.md":
        return "CONTRIBUTING.md"
    return uri if uri.startswith("benchmarks/") else f"docs/{uri}"


def resolve(page: str, target: str) -> str:
    """Return the path in the repository that a page's link leads to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def source(page: str, target: str) -> str | None:
    """Return the path of a linked file that is no part of the site, such as a module."""
    path = resolve(page, target)
    is_page = path.startswith(("docs/", "benchmarks/")) or path == "CONTRIBUTING.md"
    return None if is_page or not (ROOT / path).is_file() else path


def settings_page() -> str:
    """Return every setting with type, bounds, default and docstring."""
    lines = [
        "# Settings",
        "",
        "Every setting of a job, in TOML or as `--section.key value` "
        "([rules](../config.md)). Generated from the code.",
    ]
    table = "| setting | type and default | meaning |\n|---|---|---|"
    for section, cls in sections(Config).items():
        lines += ["", f"## [{'.'.join(section)}]", "", str(cls.__doc__), "", table]
        for path, key in keys(Config).items():
            if path[:-1] == section:
                lines += setting_rows(".".join(path), key, name=path[-1])
    return "\n".join(lines)


def setting_rows(anchor: str, key: Key, *, name: str) -> list[str]:
    """Return the row of a setting, and of each key of a table in it."""
    default = "not set" if key.default is None else f"`{literal(key.default)}`"
    text = docstring_of(key).replace("*", "\\*").replace("<", "&lt;")
    for need in key.requirements:
        text += (
            f" {' or '.join(map(literal, need.of))} needs `{need}`."
            if need.of
            else f" Needs `{need}`."
        )
    cells = [
        f'<a id="{anchor}"></a><code>{name.replace("_", "_<wbr>")}</code>',
        f"{type_text(key)}<br>{'required' if key.default is MISSING else default}",
        text,
    ]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"]
    inner = keys(key.item) if is_dataclass(key.item) else {}
    for path, item in inner.items():
        rows += setting_rows(f"{anchor}.{path[0]}", item, name=f"{name}.{path[0]}")
    return rows


def verbs_page() -> str:
    """Return the `--help` of every verb."""
    lines = ["# Verbs", "", "The help of each verb of `torchtitan VERB`. Generated from the code."]
    lines += ["", "| verb | does |", "|---|---|"]
    lines += [f"| [`{verb}`](#{verb}) | {summary} |" for verb, (_, summary) in VERBS.items()]
    for verb, (module, _) in VERBS.items():
        lines += ["", f"## {verb}", ""]
        if verb == "train":
            lines.append(
                "`torchtitan train JOB [--section.key VALUE ...]` trains a job on `NGPU` ranks. "
                "JOB is a TOML file or the name of a recipe. Options are [settings](settings.md)."
            )
            continue
        for words in ([], *([subverb] for subverb in SUBVERBS.get(verb, ()))):
            if words:
                lines += ["", f"### {verb} {words[0]}", ""]
            lines += ["```text", help_of(module, words), "```"]
    return "\n".join(lines)


def help_of(module: str, words: list[str]) -> str:
    """Return what a verb prints for --help."""
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit), patch.dict(os.environ, {"COLUMNS": "100"}):
        import_module(module).main([*words, "--help"])
    text = out.getvalue().strip()
    # config lists all settings, which are a page of their own
    return text.split("\n\n")[0] if module == "torchtitan.tools.config" else text


def python_page() -> str:
    """Return the directives of mkdocstrings for the public API."""
    lines = [
        "# Python",
        "",
        "`import torchtitan` offers these ([guide](../config.md#from-python)).",
    ]
    for title, names in PYTHON.items():
        lines += ["", f"## {title}"]
        lines += [f"\n::: {name}" for name in names]
    return "\n".join(lines)
