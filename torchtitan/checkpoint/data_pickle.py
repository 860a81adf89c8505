"""The records of DCP's `.metadata`, a pickle, made without running anything that is in it.

A pickle is a program: it calls what it names, and changes what it gets hold of. Two ways of keeping
it harmless are to write another format, which no other tool would read, and to run only the few
instructions that DCP's writer uses, on values that end with the read. This is the second. A class
or function stays a mere name while the program runs, and only records, lists and dictionaries that
it made itself are filled. Python's own reader in C hands out the live objects, and grows its memo
to any index that it reads.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan.base.errors import CheckpointError

Place = _StorageInfo
"""Where a piece of a tensor lies."""
_MAX_DIMS = 64
_KEYS = {str, MetadataIndex}
_MAX_ALIKE = 8
"""Keys that may have one hash: a dictionary compares each of them with all the others."""
_RECORDS: dict[type, dict[str, tuple[type, ...]]] = {
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    Metadata: {"state_dict_metadata": (dict,), "storage_data": (dict,)},
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, type(None)), "index": (int, type(None))},
    StorageMeta: {},
    TensorStorageMetadata: {
        "properties": (TensorProperties,),
        "size": (torch.Size,),
        "chunks": (list,),
    },
    _StorageInfo: {"offset": (int,), "length": (int,)},
}
"""What a program may make, and what those fields are that others rely on."""
_FIELDS = {
    cls: (
        {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING},
        {f.name for f in fields(cls)},
    )
    for cls in _RECORDS
}
"""The names of the fields that a record must have, and of all that it may have."""
_INSTRUCTIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "TUPLE"),
    *("EMPTY_LIST", "EMPTY_DICT", "GLOBAL", "STACK_GLOBAL"),
    *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
)
"""Those of Python's reader that only push, pop or remember values."""


def load_records(data: bytes) -> Any:
    """Return what the pickle `data` makes; nothing in it is run.

    Raises:
        CheckpointError: It names, calls or changes what no checkpoint needs.
        Exception: Of any kind, where the bytes are damaged.
    """
    return _Reader(io.BytesIO(data)).load()


@dataclass(frozen=True)
class _Name:
    """What the program has named: to itself a value like any other."""

    make: Callable[[tuple[Any, ...]], Any] | None
    """Makes a value of arguments, where it is called."""
    record: type | None = None


class _Reader(pickle._Unpickler):
    """Runs the program. An instruction takes as long as its own bytes: nothing is hashed, printed
    or copied that may hold other values, and few keys share a hash."""

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Any]] = {}

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._alike: Counter[int] = Counter()
        """How many keys have a hash; those of texts nobody can foresee."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a name that may be used, or a dtype."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _NAMES:
            raise CheckpointError(f"it names {module}.{name}, which no checkpoint needs")
        return _NAMES[module, name]

    def load_reduce(self) -> None:
        """Call a name."""
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name) or name.make is None or type(args) is not tuple:
            raise CheckpointError("it calls what no checkpoint needs")
        self.stack.append(name.make(args))

    def load_newobj(self) -> None:
        """Make an empty record."""
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name) or name.record is None or args != ():
            raise CheckpointError("it makes what no checkpoint needs")
        self.stack.append(object.__new__(name.record))

    def load_build(self) -> None:
        """Fill a record."""
        state, record = self.stack.pop(), self.stack[-1]
        if type(record) is TensorProperties:
            _fill_properties(record, state)
        elif type(record) in _RECORDS:
            _fill(record, state)
        else:
            raise CheckpointError(f"it tries to change a {type(record).__name__}")

    def load_setitem(self) -> None:
        """Put an entry into a dictionary."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        """Put entries into a dictionary."""
        self._set(self.pop_mark())

    def _set(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], items[::2]
        if type(target) is not dict or not _KEYS.issuperset(map(type, keys)):
            raise CheckpointError(f"it puts entries into a {type(target).__name__}, by odd keys")
        hashes = [hash(key) for key in keys if type(key) is MetadataIndex]
        self._alike.update(hashes)
        if any(self._alike[one] > _MAX_ALIKE for one in hashes):
            raise CheckpointError(f"more than {_MAX_ALIKE} of its keys have one hash")
        target.update(zip(keys, items[1::2], strict=True))

    def load_append(self) -> None:
        """Put a value behind a list."""
        self._extend([self.stack.pop()])

    def load_appends(self) -> None:
        """Put values behind a list."""
        self._extend(self.pop_mark())

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise CheckpointError(f"it puts values behind a {type(target).__name__}")
        target.extend(items)


def _refusal(code: int) -> Callable[[_Reader], None]:
    def refuse(reader: _Reader) -> None:
        raise CheckpointError(f"it holds the instruction {code:#x}, which no checkpoint needs")

    return refuse


_Reader.dispatch = {
    **{code: _refusal(code) for code in range(256)},
    **{
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in _INSTRUCTIONS)
    },
    pickle.REDUCE[0]: _Reader.load_reduce,
    pickle.NEWOBJ[0]: _Reader.load_newobj,
    pickle.BUILD[0]: _Reader.load_build,
    pickle.SETITEM[0]: _Reader.load_setitem,
    pickle.SETITEMS[0]: _Reader.load_setitems,
    pickle.APPEND[0]: _Reader.load_append,
    pickle.APPENDS[0]: _Reader.load_appends,
}


def _fill(record: Any, state: Any) -> None:
    cls = type(record)
    required, known = _FIELDS[cls]
    if vars(record):  # a key of a dictionary must not change
        raise CheckpointError(f"it fills a {cls.__name__} twice")
    if type(state) is not dict or not required <= state.keys() or not state.keys() <= known:
        raise CheckpointError(f"it fills a {cls.__name__} with other fields than its own")
    for name, kinds in _RECORDS[cls].items():
        if name in state and not isinstance(state[name], kinds):
            raise CheckpointError(f"'{name}' of a {cls.__name__} is a {type(state[name]).__name__}")
    vars(record).update(state)


def _fill_properties(record: TensorProperties, state: Any) -> None:
    kinds = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)
    if type(state) is not tuple or tuple(map(type, state[: len(kinds)])) != kinds:
        raise CheckpointError("it fills TensorProperties with other values than those of a tensor")
    # torch 2.15 also writes the strides, which nothing needs and earlier versions do not know
    if len(state) > len(kinds) + 1:
        raise CheckpointError(f"it fills TensorProperties with {len(state)} values")
    record.__setstate__(state[: len(kinds)])


def _size(args: tuple[Any, ...]) -> torch.Size:
    (dims,) = args
    if type(dims) is not tuple or len(dims) > _MAX_DIMS or not all(type(n) is int for n in dims):
        raise CheckpointError(f"it has a size that is not of up to {_MAX_DIMS} whole numbers")
    return torch.Size(dims)


def _layout(args: tuple[Any, ...]) -> torch.layout:
    if args != ("torch.strided",):
        raise CheckpointError("it has a tensor of a layout that is not torch.strided")
    return torch.strided


def _encoding(args: tuple[Any, ...]) -> _MEM_FORMAT_ENCODING:
    (value,) = args
    if type(value) is not int:
        raise CheckpointError("it has a memory format that is no number")
    return _MEM_FORMAT_ENCODING(value)


def _member(args: tuple[Any, ...]) -> _MEM_FORMAT_ENCODING:
    kind, name = args
    if kind is not _NAMES[_key(_MEM_FORMAT_ENCODING)] or type(name) is not str:
        raise CheckpointError("it asks for an attribute, which no checkpoint needs")
    if name not in _MEM_FORMAT_ENCODING.__members__:
        raise CheckpointError(f"it asks for an attribute, {name[:60]}, which no checkpoint needs")
    return _MEM_FORMAT_ENCODING[name]


def _path(args: tuple[Any, ...]) -> None:
    """Where it was saved: nothing needs it."""


def _key(cls: type) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


_NAMES = {
    **{_key(cls): _Name(None, cls) for cls in (*_RECORDS, TensorProperties)},
    _key(_MEM_FORMAT_ENCODING): _Name(_encoding),
    ("torch", "Size"): _Name(_size),
    ("torch.serialization", "_get_layout"): _Name(_layout),
    # so some versions of Python, as 3.11.2, pickle an enumeration's member
    ("builtins", "getattr"): _Name(_member),
    **{
        (module, name): _Name(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
