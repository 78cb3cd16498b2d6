"""Reads tensors of safetensors files: only the parts that a rank holds, one file at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import StrategyError
from autopar.runtime.parameters.distribute import local_part
from autopar.runtime.parameters.strided_shard import chunks

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


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
        """
        paths = _files_at(Path(path))
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


def _opened(file: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise StrategyError(
            "load_pretrained needs safetensors: pip install 'autopar[safetensors]'."
        ) from error
    return safe_open(str(file), framework="pt")


def _files_at(path: Path) -> dict[Path, list[str] | None]:
    """The files at a path, with the names of the tensors to read; None for all."""
    if path.is_dir():
        found = [path / INDEX] if (path / INDEX).is_file() else sorted(path.glob("*.safetensors"))
        if len(found) > 1:
            found = [file for file in found if file.name == SINGLE]
        if not found:
            raise StrategyError(
                f"{path} has no {INDEX}, no {SINGLE} and not exactly one other .safetensors file."
            )
        path = found[0]
    if not path.is_file():
        raise StrategyError(f"there is no file or folder {path} on this rank.")
    if path.suffix != ".json":
        return {path: None}
    try:
        index: dict[str, str] = json.loads(path.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise StrategyError(f"{path} is no index of safetensors: it has no weight_map.") from error
    return {
        path.parent / file: [name for name, other in index.items() if other == file]
        for file in dict.fromkeys(index.values())
    }
