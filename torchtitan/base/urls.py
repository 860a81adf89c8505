"""Which package a URL needs."""

from __future__ import annotations

EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Extra of ours that has it, by protocol."""


def missing_package(url: str, error: ImportError) -> str:
    """Say what is missing for a URL, and how to install it."""
    protocol = url.partition("://")[0]
    extra = EXTRAS.get(protocol)
    remedy = f'"torchtitan[{extra}]"' if extra else "the package of fsspec for it"
    return f"needs a package for {protocol}:// ({error}); pip install {remedy}"
