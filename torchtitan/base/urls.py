"""URLs: supported schemes, the packages they need, and hiding of credentials.

A value that looks like a URL is never read as a path: a misspelt scheme would create a folder on
the local disk.
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
"""Schemes of object stores, with the extra of this package that installs their client."""
READ_ONLY = ("http", "https")
"""Schemes that can only be read and have no folders."""

_CREDENTIALS = re.compile(r"://(?:[^/\s]*@\S*|\S*[?]\S*)")
_LIKE_URL = re.compile(r"\s*[a-z][a-z0-9+.-]*:[:/]|.*://", re.IGNORECASE | re.DOTALL)
_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|CREDENTIAL")
_LOOKS_SECRET = re.compile(
    r"\?\S+"  # of a signed URL
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|(?:Signature|Credential|Authorization|Bearer|ya29)[=:. ]+\S+"
    r"|(?<![\w/+.-])[A-Za-z0-9/+]{40,}={0,2}"
)


def is_url(value: str) -> bool:
    """Return whether a text looks like a URL rather than a path."""
    return _LIKE_URL.match(value) is not None


def local_path(text: str) -> Path:
    """Return the path in a command-line argument; argparse reports the error for a URL."""
    if is_url(text):
        raise ArgumentTypeError(f"must be a path, not a URL, got {hide_credentials(text)!r}")
    return Path(text)


def hide_credentials(text: str) -> str:
    """Replace URLs that may contain a password or a signature."""
    return _CREDENTIALS.sub("://***", text)


def url_problem(url: str, *, also: Collection[str] = ()) -> str | None:
    """Return the violated rule if the scheme is neither in `STORES` nor in `also`."""
    scheme, separator, _ = url.partition("://")
    if separator and (scheme in STORES or scheme in also):
        return None
    schemes = ", ".join(f"{scheme}://" for scheme in (*STORES, *also))
    text = hide_credentials(url)
    return f"must be a path, or a URL with one of {schemes}, got {text!r:.200}"


def is_plain_url(url: str) -> bool:
    """Return whether a URL only names a folder, without credentials and options."""
    return not re.search(r"[@?#]", url) and bool(url.partition("://")[2].strip("/"))


def missing_package(url: str, error: ImportError) -> str:
    """Describe the package that a URL needs and how to install it."""
    protocol = url.partition("://")[0]
    extra = STORES.get(protocol)
    remedy = f"in the repository, pip install -e '.[{extra}]'" if extra else "see fsspec's docs"
    return f"needs a package for {protocol}:// ({error}); {remedy}"


def without_secrets(text: str) -> str:
    """Replace values of secret environment variables, and text that looks like a secret."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name.upper()):
            text = text.replace(value, "***")
    return _LOOKS_SECRET.sub("***", text)
