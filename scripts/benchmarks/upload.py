"""What the way to an object store costs.

The same file goes to a server of S3 on this machine, and comes back, by the library and by AWS's
own client, boto3, with its own settings:

    upload    the library's put (read for its digests, sent in parts, compared by ETag)
              against  boto3's upload_file
    download  the library's fetch (in parts, written and hashed)  against  boto3's download_file

On this machine server and clients share the cores and the wire is memory, so what is measured is
the work of the clients, at its most visible; a real wire is slower. --server starts another server
than moto's, as in scripts/store_campaign.py.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from scripts import s3_server
from scripts.benchmarks.pairs import Comparison, DisagreementError, Report, alternate, timed
from torchtitan.checkpoint.checksums import FileRecord, hash_file
from torchtitan.checkpoint.objects import ObjectStore

SUMMARY = "uploads and downloads beside the store's own client"
TARGET = "at most 1.20"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what this command alone understands."""
    parser.add_argument("--size_mib", type=int, default=256, metavar="N", help="of the file")
    parser.add_argument("--server", default=s3_server.MOTO, help="command of another server")
    parser.add_argument("--key", default="AKIAIOSFODNN7EXAMPLE", help="its access key")
    parser.add_argument("--secret", default=s3_server.SECRET, help="and what belongs to it")


def measure(args: argparse.Namespace) -> Report:
    """Compare both ways; each first pair is not counted."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        (folder / "server").mkdir()
        server = s3_server.S3Server(args.server, folder=folder / "server")
        server.start()
        undo.callback(server.kill)
        environ = s3_server.environ_of(server.port, key=args.key, secret=args.secret)
        before = {name: os.environ.get(name) for name in environ}
        undo.callback(_restore, before)
        os.environ.update(environ)
        comparisons = _compare(folder, size=args.size_mib << 20, num_pairs=args.pairs)
    about = {"size_mib": args.size_mib, "server": args.server, "torch": torch.__version__}
    return Report(about=about, comparisons=comparisons)


def _restore(environ: dict[str, str | None]) -> None:
    for name, value in environ.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _compare(folder: Path, *, size: int, num_pairs: int) -> list[Comparison]:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket=s3_server.BUCKET)
    url = f"s3://{s3_server.BUCKET}/run"
    store = ObjectStore(url, key="--server", patience_seconds=60, check="checksum")
    file, ours, theirs = folder / "file", folder / "ours", folder / "theirs"
    file.write_bytes(torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes())
    record = FileRecord(size, hash_file(file))

    how: dict[str, Any] = {"amount": size / 2**20, "unit": "MiB", "num_pairs": num_pairs}

    def put() -> float:
        store.remove(["ours"])
        return timed(lambda: store.put(file, "ours", record=record))

    def upload() -> float:
        return timed(lambda: client.upload_file(str(file), s3_server.BUCKET, "run/theirs"))

    def fetch() -> float:
        ours.unlink(missing_ok=True)
        return timed(lambda: store.fetch("ours", ours, record=record))

    def download() -> float:
        return timed(lambda: client.download_file(s3_server.BUCKET, "run/theirs", str(theirs)))

    found = [
        alternate("upload / boto3", TARGET, put, upload, **how),
        alternate("download / boto3", TARGET, fetch, download, **how),
    ]
    if {hash_file(ours), hash_file(theirs)} != {record.digest}:
        raise DisagreementError("what came back is not what was sent")
    return found
