"""Reading a DCP checkpoint without running anything that is in it.

DCP keeps what it knows of the tensors in `.metadata`, a pickle, and a pickle is a program: it calls
what it names. Two ways of keeping it harmless are to write another format, which no other tool
would read, and to let it name nothing but the handful of plain data classes that DCP's own writer
uses. This is the second. The tensors themselves are read by torch.load(weights_only=True), DCP's
entries of raw bytes, which are pickles again, are never read."""

from __future__ import annotations

import dataclasses
import pickle
from collections import defaultdict
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.ranks import reason

METADATA = ".metadata"
_DATA_CLASSES = {
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}


def read_metadata(folder: Path) -> Metadata:
    """Return what DCP knows of the tensors in `folder`.

    Raises:
        CheckpointError: The file is missing or damaged, or names what a checkpoint has no use for.
    """
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            metadata = _DataUnpickler(file).load_data()
        _check(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused, nothing in it was run: {error}") from error
    except Exception as error:  # damaged bytes can make a pickle fail in any way
        raise CheckpointError(
            f"{path} cannot be read: {reason(error)}; use another checkpoint"
        ) from error
    return metadata


class _DataUnpickler(pickle.Unpickler):
    """Builds DCP's data classes, and refuses every other name."""

    _classes: dict[type, dict[str, Any]]

    def load_data(self) -> Any:
        """Unpickle; what is read may fill objects, but not change the classes themselves."""
        self._classes = {}
        try:
            return self.load()
        finally:
            changed = [cls for cls, own in self._classes.items() if _restore(cls, own)]
            if changed:
                raise CheckpointError(f"it tries to change {changed[0].__qualname__}")

    def find_class(self, module: str, name: str) -> Any:
        """Return a data class, a dtype, or a plain stand-in for what else DCP names."""
        if (module, name) in _DATA_CLASSES:
            cls = super().find_class(module, name)
            self._classes.setdefault(cls, dict(vars(cls)))
            return cls
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _layout
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _path  # where it was saved: no more than a text
        if (module, name) == ("builtins", "getattr"):
            return _member  # so some versions of Python, as 3.11.2, pickle an enumeration's member
        raise CheckpointError(f"it names {module}.{name}, which no checkpoint needs")


def _restore(cls: type, own: dict[str, Any]) -> bool:
    """Give a class the attributes it had; tell whether any had changed."""
    now = dict(vars(cls))
    for name in now.keys() - own.keys():
        delattr(cls, name)
    changed = [name for name in own if now.get(name) is not own[name]]
    for name in changed:
        setattr(cls, name, own[name])
    return bool(changed) or now.keys() != own.keys()


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise CheckpointError(f"it has a tensor of layout {name}; only torch.strided is read")
    return torch.strided


def _member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, EnumMeta) and name in kind.__members__):
        raise CheckpointError(f"it asks for an attribute, {name}, which no checkpoint needs")
    member: Enum = kind[name]
    return member


def _path(*parts: str) -> str:
    return "/".join(str(part) for part in parts)


def _check(metadata: Any) -> None:
    """Refuse files outside of the folder, and anything between the file and the tensor."""
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"it holds a {type(metadata).__name__}, not DCP's metadata")
    for index, place in metadata.storage_data.items():
        file = place.relative_path
        if not isinstance(file, str) or Path(file).name != file or file == "..":
            raise CheckpointError(f"'{index.fqn}' lies in {file!r}, which is no file beside it")
        if place.transform_descriptors:
            raise CheckpointError(f"'{index.fqn}' needs {place.transform_descriptors} to be read")


def is_tensor(entry: Any) -> bool:
    """Tell whether an entry of the metadata is a tensor, not raw bytes."""
    return isinstance(entry, TensorStorageMetadata)


class TensorReader(dcp.FileSystemReader):
    """Reads tensors, and tensors alone, from a DCP folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = read_metadata(folder)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once."""
        if not isinstance(self._metadata.storage_meta, StorageMeta):
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for, file by file.

        Raises:
            CheckpointError: Names the file that is missing, damaged or refused.
        """
        by_file = defaultdict(list)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise CheckpointError(f"'{item.storage_index.fqn}' is raw bytes, not a tensor")
            by_file[self.storage_data[item.storage_index].relative_path].append(item)
        for name, items in by_file.items():
            try:
                super().read_data(dataclasses.replace(plan, items=items), planner)
            except Exception as error:  # damaged bytes can make reading fail in any way
                raise CheckpointError(
                    f"{Path(self.path) / name} cannot be read, nothing in it was run: "
                    f"{reason(error)}; use another checkpoint"
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done
