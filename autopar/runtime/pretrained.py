"""`load_pretrained`: fills the shards of a compiled model from safetensors files."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from autopar.errors import StrategyError
from autopar.runtime.agreement.consensus import assert_same_across_ranks, run_on_all_ranks
from autopar.runtime.module import DistributedModule
from autopar.runtime.parameters.distribute import is_remote
from autopar.runtime.parameters.safetensors_files import SafetensorsFiles

MAX_NAMED = 8


class LoadedKeys(NamedTuple):
    """Names that a load left out: of the model's tensors, and of the files' tensors."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pretrained(
    model: DistributedModule, path: str | Path, *, strict: bool = True
) -> LoadedKeys:
    """Loads parameters and persistent buffers of a compiled model; all ranks call this at once.

    Each rank reads only its own parts, one file after the other. On a model without values, this
    replaces initialisation. Values are cast to the dtype of the parameter. One name of a tied
    parameter suffices.

    Args:
        model: what `autopar.compile` returned, before or after its first call.
        path: a .safetensors file, a sharded index of Hugging Face (`model.safetensors.index.json`),
            or a folder with either.
        strict: refuse files that lack tensors of the model or have others.

    Returns:
        The missing and the unexpected names, as `load_state_dict` does.

    Raises:
        StrategyError: names do not match under `strict`, shapes differ, or a file is missing.
        DisagreementError: the ranks find different files.
    """
    if not isinstance(model, DistributedModule):
        raise StrategyError("load_pretrained takes what autopar.compile returned.")
    files = run_on_all_ranks(lambda: SafetensorsFiles.find(path))
    described = str([(name, tuple(shape)) for name, shape in sorted(files.shapes.items())])
    assert_same_across_ranks({"checkpoint": described}, "Give every rank the same files.")
    tensors, keys = _match(model, files)
    if strict and any(keys):
        kinds = zip(("missing", "unexpected"), keys, strict=True)
        told = "; ".join(f"{kind} in the file: {_listed(names)}" for kind, names in kinds if names)
        raise StrategyError(f"{path} does not have the names of the model. {told}.")
    if wrong := [n for n, x in tensors.items() if x.shape != files.shapes[n]]:
        name = wrong[0]
        raise StrategyError(
            f"{name} has the shape {list(files.shapes[name])} in {files.files[name]}, and "
            f"{list(tensors[name].shape)} in the model ({len(wrong)} such names)."
        )
    model.load_values_of({n: x.shape for n, x in tensors.items()}, partial(_read, files, tensors))
    return keys


def _match(
    model: DistributedModule, files: SafetensorsFiles
) -> tuple[dict[str, Tensor], LoadedKeys]:
    """The tensors to load, once each, by a name in the files; and the names left out."""
    expected = nn.Module.state_dict(model._wrapped[0], keep_vars=True)
    found: dict[int, str] = {}
    for name, tensor in expected.items():
        if name in files.shapes:
            found.setdefault(id(tensor), name)
    tensors = {name: expected[name] for name in found.values()}
    missing = [name for name, tensor in expected.items() if id(tensor) not in found]
    return tensors, LoadedKeys(missing, sorted(files.shapes.keys() - expected.keys()))


def _read(files: SafetensorsFiles, tensors: dict[str, Tensor]) -> None:
    local = {name: tensor for name, tensor in tensors.items() if not is_remote(tensor)}
    run_on_all_ranks(lambda: files.read_into(local))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
