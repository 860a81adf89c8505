"""What holds for all URLs: which are supported, which package one needs, and that no credential is
shown.

A value that looks like a URL is never read as a path: a misspelt scheme would become a folder on
this machine's disk, where nobody looks for it.
"""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Collection
from pathlib import Path

STORES: dict[str, str | None] = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": None,
    "abfs": None,
    "file": None,
}
"""Schemes of the object stores, each with the extra of ours that has its package."""
READ_ONLY = ("http", "https")
"""Schemes of what can be read, and holds no folders."""

_CREDENTIALS = re.compile(r"://(?:[^/\s]*@\S*|\S*[?]\S*)")
_LIKE_URL = re.compile(r"\s*[a-z][a-z0-9+.-]*:[:/]|.*://", re.IGNORECASE | re.DOTALL)
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|CREDENTIAL")
_LOOKS_SECRET = re.compile(
    r"\?\S+"  # of a signed URL
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|(?:Signature|Credential|Authorization|Bearer|ya29)[=:. ]*\S+"
    r"|(?<![\w/+.-])[A-Za-z0-9/+]{40,}={0,2}"
)


def is_url(value: str) -> bool:
    """Return whether a text is meant as a URL, not as a path."""
    return _LIKE_URL.match(value) is not None


def local_path(text: str) -> Path:
    """Return a command line's path; argparse refuses what this does."""
    if is_url(text):
        raise ArgumentTypeError(f"must be a path, not a URL, got {hide_credentials(text)!r}")
    return Path(text)


def hide_credentials(text: str) -> str:
    """Return a text without what may be a password or a signature in a URL."""
    return _CREDENTIALS.sub("://***", text)


def url_problem(url: str, *, also: Collection[str] = ()) -> str | None:
    """Return the rule that a URL breaks: its scheme must be one of `STORES`, or of `also`."""
    scheme, separator, _ = url.partition("://")
    if separator and (scheme in STORES or scheme in also):
        return None
    schemes = ", ".join(f"{scheme}://" for scheme in (*STORES, *also))
    shown = hide_credentials(url)
    return f"must be a path, or a URL that begins with one of {schemes}, got {shown!r:.200}"


def is_plain_url(url: str) -> bool:
    """Return whether a URL names a folder and nothing else: no credentials, no options."""
    return not re.search(r"[@?#]", url) and bool(url.partition("://")[2].strip("/"))


def missing_package(url: str, error: ImportError) -> str:
    """Say what is missing for a URL, and how to install it."""
    protocol = url.partition("://")[0]
    extra = STORES.get(protocol)
    remedy = f"in the repository, pip install -e '.[{extra}]'" if extra else "see fsspec's docs"
    return f"needs a package for {protocol}:// ({error}); {remedy}"


def without_secrets(text: str) -> str:
    """Return a text without the values of variables that hold secrets, and what looks like one."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name.upper()):
            text = text.replace(value, "***")
    return _LOOKS_SECRET.sub("***", text)
