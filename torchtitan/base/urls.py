"""What holds for all URLs: which package one needs, and that no credential is shown."""

from __future__ import annotations

import os
import re

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extra of ours that has it, by protocol."""

_SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|KEY|CREDENTIAL")
_LOOKS_SECRET = re.compile(
    r"\?\S+"  # of a signed URL
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|(?:Signature|Credential|Authorization|Bearer|ya29)[=:. ]*\S+"
    r"|(?<![\w/+.-])[A-Za-z0-9/+]{40,}={0,2}"
)


def missing_package(url: str, error: ImportError) -> str:
    """Say what is missing for a URL, and how to install it."""
    protocol = url.partition("://")[0]
    extra = EXTRAS.get(protocol)
    remedy = f"in the repository, pip install -e '.[{extra}]'" if extra else "see fsspec's docs"
    return f"needs a package for {protocol}:// ({error}); {remedy}"


def without_secrets(text: str) -> str:
    """Return a text without the values of variables that hold secrets, and what looks like one."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET.search(name.upper()):
            text = text.replace(value, "***")
    return _LOOKS_SECRET.sub("***", text)
