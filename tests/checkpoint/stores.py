"""Object stores for tests: a server of S3 on this machine, and a store in memory with faults."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from scripts.ports import hold_port

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY12"


class FaultyStore(MemoryFileSystem):
    """A store in memory whose requests may fail, be cut short, or list too little."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way: one for the process
    pseudo_dirs = [""]  # noqa: RUF012
    before: Callable[[str, str], None] = staticmethod(lambda request, path: None)
    """Called before each request, with its kind and path; it may raise."""
    answer: Callable[[str, bytes], bytes] = staticmethod(lambda path, content: content)
    """Changes what a read returns."""
    unlisted: Callable[[str], bool] = staticmethod(lambda path: False)

    @classmethod
    def heal(cls, *, empty: bool = True) -> None:
        cls.before = staticmethod(lambda request, path: None)
        cls.answer = staticmethod(lambda path, content: content)
        cls.unlisted = staticmethod(lambda path: False)
        if empty:
            cls.store.clear()
            cls.pseudo_dirs[:] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("faulty://").strip("/")

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        type(self).before("read", path)
        content = super().cat_file(path, start=start, end=end, **kwargs)
        return type(self).answer(path, content)

    def pipe_file(self, path: str, value: bytes, *args: Any, **kwargs: Any) -> None:
        type(self).before("write", path)
        super().pipe_file(path, value, *args, **kwargs)

    def put_file(self, lpath: str, rpath: str, *args: Any, **kwargs: Any) -> None:
        type(self).before("write", rpath)
        super().pipe_file(rpath, Path(lpath).read_bytes())

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        type(self).before("look", path)
        found: dict[str, Any] = super().info(path, **kwargs)
        return found

    def rm_file(self, path: str) -> None:
        type(self).before("remove", path)
        path = self._strip_protocol(path)
        if path not in self.store:
            raise FileNotFoundError(path)
        del self.store[path]

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        type(self).before("list", path)
        found = super().ls(path, detail=True, **kwargs)
        seen = [
            entry
            for entry in found
            if not (
                type(self).unlisted(entry["name"])
                or (
                    entry["type"] == "directory"
                    and all(
                        type(self).unlisted(name)
                        for name in self.store
                        if name.startswith(entry["name"] + "/")
                    )
                )
            )
        ]
        return seen if detail else [entry["name"] for entry in seen]


@contextmanager
def faulty_store() -> Iterator[type[FaultyStore]]:
    """Let faulty:// be a store, empty and in good health at first."""
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    FaultyStore.heal()
    try:
        yield FaultyStore
    finally:
        FaultyStore.heal()


class S3Server:
    """moto's server, at one port for all of its lives; what it stored is lost when it is killed."""

    def __init__(self) -> None:
        self._place = hold_port()
        self.port = self._place.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environ(self) -> dict[str, str]:
        """The variables by which a client finds it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._place.close()
        command = [sys.executable, "-m", "moto.server", "-p", str(self.port)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=quiet, stderr=quiet)
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/moto-api/", timeout=5).close()
                return
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise
                time.sleep(0.1)

    def kill(self) -> None:
        """Kill it as a machine that loses its power does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def s3_server(bucket: str) -> Iterator[S3Server]:
    """Run a server of S3 with an empty bucket, which this process's clients use."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package)
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environ.items():
            patch.setenv(name, value)
        try:
            server.start()
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
            yield server
        finally:
            server.kill()


def environ_of(server: S3Server) -> dict[str, str]:
    """The environment of a process that uses the server."""
    return {**os.environ, **server.environ}
