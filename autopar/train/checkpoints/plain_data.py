"""Checkpoints as data: tensors and plain values, which run no code when they are read.

`pickle` may call any function that a file names. `torch.load(weights_only=True)` does not, and
`PlainReader` and `PlainPlanner` read the files of torch.distributed.checkpoint alike.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from autopar._torch import pytree
from autopar.core.common.files import open_file
from autopar.errors import CheckpointError, StrategyError
from autopar.formatting import first_line
from autopar.train.checkpoints.torch_index import INDEX, read_index

PLAIN = (bool, int, float, str, bytes, type(None))
"""Types that are data, besides tensors; not their subclasses, which pickle by name."""

PARTS = ("mesh", "scheduler", "scaler", "ranks")
"""Keys of the values beside tensors."""

_DTYPE = "numpy dtype"

_TRUST = (
    "Checkpoints of autopar before 0.1 hold objects: if nobody else could write this folder, call "
    "resume(trusted=True) once, and the next save is plain."
)


def check_plain(what: str, values: Any) -> None:
    """Checks that values can be read back as data.

    Raises:
        StrategyError: they hold other objects; a checkpoint of them could not be read.
    """
    leaves = (leaf for leaf in pytree.tree_leaves(values) if type(leaf) not in PLAIN)
    odd = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    if not odd:
        return
    buffer = io.BytesIO()
    try:
        torch.save(odd, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in odd}))
        raise StrategyError(
            f"the state of {what} holds objects ({kinds}) that a checkpoint cannot: let its "
            "state_dict return tensors, numbers, text, lists and dicts"
        ) from error


def without_arrays(value: Any) -> Any:
    """Nested dicts with lists in place of NumPy's arrays."""
    if isinstance(value, Mapping):
        return {key: without_arrays(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {_DTYPE: str(value.dtype), "values": value.tolist()}
    return value


def with_arrays(value: Any) -> Any:
    """Nested dicts with NumPy's arrays again."""
    if isinstance(value, Mapping) and _DTYPE in value:
        return np.array(value["values"], dtype=value[_DTYPE])
    if isinstance(value, Mapping):
        return {key: with_arrays(item) for key, item in value.items()}
    return value


def load_plain(path: Path, *, trusted: bool = False, advice: str = "") -> Any:
    """The content of a file of `torch.save`, on the CPU.

    Raises:
        CheckpointError: the file holds other objects than plain data and is not `trusted`, or it
            cannot be read.
    """
    try:
        with open_file(path) as file:
            return torch.load(file, map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds objects, and reading them may run code, or it is damaged. {advice}"
        ) from error
    except Exception as error:  # torch raises anything for a damaged file
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}. {advice}") from error


def read_values(path: Path, *, trusted: bool) -> dict[str, Any]:
    """The values of a file of `torch.save`.

    Raises:
        CheckpointError: the file holds other objects than plain data and is not `trusted`, or it
            is no such file.
    """
    values = load_plain(path, trusted=trusted, advice=_TRUST)
    if not isinstance(values, dict) or not values.keys() >= set(PARTS):
        raise CheckpointError(f"{path} is not of a checkpoint of autopar: give another folder")
    return values


class _RegularFiles(FileSystem):
    """Files on disk that are regular."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with open_file(Path(path)) as file:
            yield cast(io.IOBase, file)


class PlainReader(FileSystemReader):
    """A reader of a checkpoint whose index is data."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fs = _RegularFiles()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open_file(Path(self.path) / INDEX) as file:
            metadata = read_index(Path(self.path), file)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """A planner that reads values beside tensors as data."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)  # raises before torch reads it without a check
        value.seek(0)
        super().load_bytes(read_item, value)
