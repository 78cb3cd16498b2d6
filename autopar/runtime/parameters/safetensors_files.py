"""Reads tensors of safetensors files: only the parts that a rank holds, one file at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.core.common.files import open_file, read_typed
from autopar.errors import CheckpointError, StrategyError
from autopar.formatting import first_line
from autopar.runtime.parameters.distribute import local_part
from autopar.runtime.parameters.strided_shard import chunks

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

CACHED = "snapshots"
"""Folder of the revisions of a model in the cache of Hugging Face."""


@dataclass(frozen=True)
class SafetensorsFiles:
    """Tensors in one or several safetensors files.

    Attributes:
        files: file of each tensor.
        shapes: global shape of each tensor.
    """

    files: Mapping[str, Path]
    shapes: Mapping[str, torch.Size]

    @staticmethod
    def find(path: str | Path) -> SafetensorsFiles:
        """The tensors of a file, of a sharded index of Hugging Face, or of a folder with either.

        Raises:
            StrategyError: there is no such file, or the index names tensors that files lack.
            CheckpointError: a file is damaged, is no regular file, or lies outside of the folder.
        """
        try:
            paths = _files_at(Path(path))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {first_line(error)}.") from error
        shapes: dict[str, torch.Size] = {}
        files: dict[str, Path] = {}
        for file, wanted in paths.items():
            with _opened(file) as opened:
                names = opened.keys() if wanted is None else wanted
                if absent := sorted(set(names) - set(opened.keys())):
                    raise StrategyError(f"{file} has no tensor {absent[0]}, which its index names.")
                for name in names:
                    shapes[name] = torch.Size(opened.get_slice(name).get_shape())
                    files[name] = file
        return SafetensorsFiles(files, shapes)

    @torch.no_grad()
    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Reads this rank's parts of tensors by name, cast to the dtype of each target."""
        for file in dict.fromkeys(self.files[name] for name in targets):
            with _opened(file) as opened:
                for name, target in targets.items():
                    if self.files[name] == file:
                        _read(opened, name, target)


def _read(opened: Any, name: str, target: Tensor) -> None:
    if not isinstance(target, DTensor) or local_part(target).shape == target.shape:
        local_part(target).copy_(opened.get_tensor(name))
        return
    values = opened.get_slice(name)
    for chunk, part in chunks(target):
        place = zip(chunk.offsets, chunk.sizes, strict=True)
        part.copy_(values[tuple(slice(begin, begin + size) for begin, size in place)])


def read_whole(file: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, by name.

    Raises:
        CheckpointError: the file is damaged, or is no regular file.
    """
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise StrategyError(
            "load_pretrained needs safetensors: pip install 'autopar[safetensors]'."
        ) from error
    try:
        # `open_file` refuses a pipe, at which `safe_open` would wait forever.
        with open_file(file), safe_open(str(file), framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {first_line(error)}. Fetch or save it again."
        ) from error


def _files_at(path: Path) -> dict[Path, list[str] | None]:
    """The files at a path, with the names of the tensors to read; None for all."""
    if path.is_dir():
        found = [path / INDEX] if (path / INDEX).exists() else sorted(path.glob("*.safetensors"))
        if len(found) > 1:
            found = [file for file in found if file.name == SINGLE]
        if not found:
            raise StrategyError(
                f"{path} has no {INDEX}, no {SINGLE} and not exactly one other .safetensors file."
            )
        path = _inside(path, found[0].name)
    if not path.exists():
        raise StrategyError(f"there is no file or folder {path} on this rank.")
    if path.suffix != ".json":
        return {path: None}
    names_of: dict[str, list[str]] = {}
    for name, file in _read_index(path).items():
        names_of.setdefault(file, []).append(name)
    return {_inside(path.parent, file): names for file, names in names_of.items()}


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor in a sharded index of Hugging Face."""
    try:
        return read_typed(path, _Index).weight_map
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no index of safetensors: {first_line(error)}. Fetch or save it again."
        ) from error


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _inside(folder: Path, name: str) -> Path:
    """A file of a folder, whose content may name it or link it.

    A link may lead to the folder, or to the `blobs` of the cache of Hugging Face that holds it:
    `blobs` and `snapshots/REVISION` lie side by side there.
    """
    folder = folder.resolve()
    stores = [p.parents[1] / "blobs" for p in (folder, *folder.parents) if p.parent.name == CACHED]
    try:
        target = (folder / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL, half a pair, a circle of links
        raise CheckpointError(f"{name!r} in {folder} is no file: save the folder again.") from error
    if Path(name).name != name or not any(map(target.is_relative_to, (folder, *stores))):
        raise CheckpointError(
            f"{name!r} in {folder} leads out of the folder, to {target}: put the file itself there."
        )
    return folder / name
