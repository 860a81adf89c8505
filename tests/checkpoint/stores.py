"""Object stores for tests: a server of S3 on this machine, and a store in memory with faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from scripts.s3_server import SECRET, S3Server, environ_of
from scripts.s3_server import s3_server as running
from torchtitan.base import urls

__all__ = ["SECRET", "FaultyStore", "S3Server", "environ_of", "faulty_store", "s3_server"]


class FaultyStore(MemoryFileSystem):
    """A store in memory whose requests may fail or be cut short."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way: one for the process
    pseudo_dirs = [""]  # noqa: RUF012
    before: Callable[[str, str], None] = staticmethod(lambda request, path: None)
    """Called before each request, with its kind and path; it may raise."""
    answer: Callable[[str, bytes], bytes] = staticmethod(lambda path, content: content)
    """Changes what a read returns."""

    @classmethod
    def heal(cls, *, empty: bool = True) -> None:
        cls.before = staticmethod(lambda request, path: None)
        cls.answer = staticmethod(lambda path, content: content)
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

    def get_file(self, rpath: str, lpath: str, *args: Any, **kwargs: Any) -> None:
        Path(lpath).write_bytes(self.cat_file(rpath))

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

    def find(self, path: str, *args: Any, **kwargs: Any) -> Any:
        type(self).before("list", path)
        return super().find(path, *args, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        type(self).before("list", path)
        found: list[Any] = super().ls(path, detail=detail, **kwargs)
        return found


@contextmanager
def faulty_store() -> Iterator[type[FaultyStore]]:
    """Let faulty:// be a store, empty and in good health at first."""
    fsspec.register_implementation("faulty", FaultyStore, clobber=True)
    FaultyStore.heal()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(urls.STORES, "faulty", None)
            yield FaultyStore
    finally:
        FaultyStore.heal()


@contextmanager
def s3_server(bucket: str) -> Iterator[S3Server]:
    """Run a server of S3 with an empty bucket, which this process's clients use."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(package)
    with pytest.MonkeyPatch.context() as patch, running() as server:
        for name, value in environ_of(server.port).items():
            patch.setenv(name, value)
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
        yield server
