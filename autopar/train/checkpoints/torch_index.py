"""`read_index`: the `.metadata` file of torch.distributed.checkpoint, read as data.

torch keeps its index as a pickle. A pickle calls what it names, and one that names nothing harmful
may still not end: each level of a tuple that holds the one below twice doubles the time of a hash.
So an index may name torch's own types alone, and every value has the type that torch gives it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import IO, Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

INDEX = ".metadata"


def _layout(name: object) -> torch.layout:
    layouts = {"torch.strided": torch.strided}
    if type(name) is not str or name not in layouts:  # the type first, for a hash may not end
        raise pickle.UnpicklingError(f"{INDEX} names a layout that no checkpoint has")
    return layouts[name]


def _memory_format(code: object) -> Enum:
    if type(code) is not int:
        raise pickle.UnpicklingError(f"{INDEX} names a memory format that torch has not")
    return _memory_formats()(code)


def _memory_formats() -> type[Enum]:
    return type(TensorProperties().__getstate__()[3])


def _member(kind: object, name: object) -> Enum:
    """The memory format of this name, as Python 3.11.0 to 3.11.3 pickle it."""
    if kind is not _memory_format or type(name) is not str:
        raise pickle.UnpicklingError(f"{INDEX} names an attribute that no index holds")
    return _memory_formats()[name]


_METADATA = Metadata.__module__
_STORAGE = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")

_RECORDS = frozenset(
    {
        _STORAGE,
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "ChunkStorageMetadata"),
        (_METADATA, "TensorStorageMetadata"),
        (_METADATA, "BytesStorageMetadata"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "StorageMeta"),
    }
)
"""Types with fields that an index names, by module and name."""

_NAMES: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _layout,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    ("builtins", "getattr"): _member,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,  # Python 3.13
}
"""Other names in an index, besides dtypes."""

_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE),
    *(pickle.BINGET, pickle.LONG_BINGET, pickle.STACK_GLOBAL),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BINFLOAT),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.NEWOBJ, pickle.REDUCE, pickle.BUILD),
)
"""Steps of a pickle that make an index, in the protocols 4 and 5 that Python writes."""


def read_index(path: Path, file: IO[bytes]) -> Metadata:
    """The index of a checkpoint in `path`, from its open file.

    Raises:
        UnpicklingError: it names other types than torch's index does, holds values of other types,
            or leads out of its folder.
    """
    index: Metadata = _IndexUnpickler(file).load()
    if type(index) is not Metadata:
        raise _fault(path, index)
    _check_all(path, index.state_dict_metadata, _is_text, _is_stored)
    _check_all(path, index.planner_data, _is_text, _is_path)
    _check_all(path, index.storage_data, _is_place, _is_storage)
    if not isinstance(index.storage_meta, StorageMeta | None):
        raise _fault(path, index.storage_meta)
    return index


def _check_all(
    path: Path, items: Any, is_key: Callable[[Any], bool], is_value: Callable[[Any], bool]
) -> None:
    if items is None:
        return
    if type(items) is not dict:
        raise _fault(path, items)
    for key, value in items.items():
        if not is_key(key) or not is_value(value):
            raise _fault(path, value)


def _fault(path: Path, value: Any) -> pickle.UnpicklingError:
    kind = type(value).__name__
    return pickle.UnpicklingError(f"{path / INDEX} holds a {kind} that no index of torch holds")


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_size(value: Any) -> bool:
    return type(value) is torch.Size


def _is_path(value: Any) -> bool:
    """Whether a value is the path of a state: names and numbers."""
    return type(value) in (tuple, list) and all(type(each) in (str, int) for each in value)


def _is_place(value: Any) -> bool:
    return (
        type(value) is MetadataIndex
        and type(value.fqn) is str
        and type(value.offset) in (torch.Size, type(None))
        and type(value.index) in (int, type(None))
    )


def _is_storage(value: Any) -> bool:
    """Whether a value is a place in a file of the same folder."""
    return (
        _name_of(value) == _STORAGE
        and type(value.relative_path) is str
        and Path(value.relative_path).name == value.relative_path
        and type(value.offset) is int
        and type(value.length) is int
    )


def _is_stored(value: Any) -> bool:
    if type(value) is not TensorStorageMetadata:
        return type(value) is BytesStorageMetadata
    return (
        type(value.properties) is TensorProperties
        and _is_size(value.size)
        and type(value.chunks) is list
        and all(_is_chunk(each) for each in value.chunks)
    )


def _is_chunk(value: Any) -> bool:
    return type(value) is ChunkStorageMetadata and _is_size(value.offsets) and _is_size(value.sizes)


def _name_of(value: object) -> tuple[str, str]:
    """Module and name of a value's type."""
    return type(value).__module__, type(value).__name__


_Unpickler: Any = pickle._Unpickler  # written in Python: that in C hashes keys unseen


class _IndexUnpickler(_Unpickler):  # type: ignore[misc]  # typeshed has no steps of it
    """An unpickler that knows what an index holds, and sees each key before it is hashed."""

    dispatch: ClassVar = {code[0]: _Unpickler.dispatch[code[0]] for code in _OPCODES}

    def load(self) -> Any:
        try:
            return super().load()
        except (KeyError, IndexError) as error:
            raise pickle.UnpicklingError(
                f"{INDEX} is damaged, or holds what no index does"
            ) from error

    def find_class(self, module: str, name: str) -> Any:
        if type(module) is type(name) is str:
            if (module, name) in _RECORDS:
                return super().find_class(module, name)
            if (module, name) in _NAMES:
                return _NAMES[module, name]
            if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
                return dtype
            raise pickle.UnpicklingError(f"{INDEX} names {module}.{name}, which no index holds")
        raise pickle.UnpicklingError(f"{INDEX} names what is no text")

    def load_setitem(self) -> None:
        _check_key(self.stack[-2])
        super().load_setitem()

    def load_setitems(self) -> None:
        for key in self.stack[::2]:
            _check_key(key)
        super().load_setitems()

    def load_build(self) -> None:
        if _name_of(self.stack[-2]) not in _RECORDS:  # else it would change a type for the process
            raise pickle.UnpicklingError(f"{INDEX} changes what it does not hold")
        super().load_build()

    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.BUILD[0]] = load_build


def _check_key(key: object) -> None:
    if not _is_text(key) and not _is_place(key):
        raise pickle.UnpicklingError(f"{INDEX} has a {type(key).__name__} for a key")
