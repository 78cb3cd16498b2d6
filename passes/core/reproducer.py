"""Reproducers: files with a graph and the passes that fail on it, written and read as JSON.

Every value is text that `literals` reads, so that reading runs no code of a file. Nodes call
operators of torch and `FUNCTIONS` alone, and take no tensors but nodes. So a pass on a graph of a
file runs operators on fake tensors only.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensor, FakeTensorMode, OpOverload
from autopar.core.common.files import read_json
from autopar.core.common.notices import NumericsNote
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import Partial, Replicate, Shard, UnevenRanks, Varying
from autopar.errors import PassError
from autopar.passes.core.collective_ops import FUNCTIONS
from autopar.passes.core.literals import Constructors, constructors_in, field_types, read, write
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.pass_pipeline import PassPipeline

Dims = tuple[int, ...]

FOLDER = "AUTOPAR_REPRODUCERS"
"""Environment variable of the folder for reproducers; the temporary folder by default."""

_CACHES = ("cost_type",)
"""Keys of a node's meta that are computed again where they are missing."""

_FUNCTIONS = {f"{f.__module__}:{f.__qualname__}": f for f in FUNCTIONS}

_FILES = {"filename"}
"""Arguments by which an operator opens or makes a file."""

_CONSTRUCTORS: Constructors = {
    **constructors_in([*field_types(TrainingGraph), Partial, Replicate, Shard, Varying]),
    "NumericsNote": NumericsNote,
    "UnevenRanks": UnevenRanks,
}


@dataclass(frozen=True)
class Reproducer:
    """A graph, the pass that failed on it with those behind it, and the error's first line."""

    graph: TrainingGraph
    pipeline: PassPipeline
    error: str = ""


def command(path: Path, pipeline: PassPipeline) -> str:
    """The shell command that runs the passes of a reproducer again."""
    modules = dict.fromkeys(map(_module, pipeline))
    imports = "".join(f" --import {name}" for name in modules if not name.startswith("autopar."))
    return f"{Path(sys.executable).name} -m autopar.passes.core.reproduce {path}{imports}"


def _module(item: Pass) -> str:
    """The module that defines a pass, or its file where it cannot be imported by name."""
    name = type(item).__module__
    if name == "__main__" or find_spec(name.partition(".")[0]) is None:
        return str(type(item).__call__.__code__.co_filename)
    return name


def save(reproducer: Reproducer) -> Path:
    """Writes a new file, in `$AUTOPAR_REPRODUCERS` or the temporary folder.

    Raises:
        PassError: a node calls or takes something that has no text.
    """
    graph = reproducer.graph
    document = {
        "error": reproducer.error,
        "pipeline": str(reproducer.pipeline).splitlines(),
        "graph": {
            field.name: write(getattr(graph, field.name), _written)
            for field in fields(graph)
            if field.name not in ("graph", "disposable")
        },
        "nodes": [_node_record(node) for node in graph.graph.nodes],
    }
    folder = os.environ.get(FOLDER) or None
    handle, path = tempfile.mkstemp(".json", "autopar-pass-", folder)
    with open(handle, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
    return Path(path)


def load(path: str | Path) -> Reproducer:
    """Reads a file that `save` wrote; the modules of its passes must be imported.

    Raises:
        PassError: the file is no reproducer, or a pass in it is unknown.
    """
    try:
        document = read_json(path)
        pipeline = PassPipeline.parse("\n".join(document["pipeline"]))
        graph = _load_graph(document["nodes"], document["graph"])
        return Reproducer(graph, pipeline, document["error"])
    except PassError:
        raise
    except Exception as failure:  # torch raises anything for a graph that makes no sense
        raise PassError(f"{path} is no reproducer of autopar: {failure!r}") from failure


def _load_graph(records: list[dict[str, str]], graph_fields: Mapping[str, str]) -> TrainingGraph:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    # Arguments may not name tensors: operators would run at once on those that are not fake.
    arguments: Constructors = {**_CONSTRUCTORS, "Node": nodes.__getitem__}
    described: Constructors = {**arguments, "FakeTensor": partial(_fake_tensor, mode)}
    constructors: Constructors = {**described, "Constant": _constant}
    for record in records:
        op, name, target = record["op"], record["name"], record["target"]
        args, kwargs = (read(record[key], arguments) for key in ("args", "kwargs"))
        called = _function(target) if op == "call_function" else target
        nodes[name] = graph.create_node(op, called, args, kwargs, name)
        nodes[name].meta = read(record["meta"], described)
    values = {name: read(text, constructors) for name, text in graph_fields.items()}
    return TrainingGraph(graph, **values)


def _node_record(node: fx.Node) -> dict[str, str]:
    meta = {key: value for key, value in node.meta.items() if key not in _CACHES}
    target: Any = node.target
    has_name = isinstance(target, (str, OpOverload))
    return {
        "op": node.op,
        "name": node.name,
        "target": str(target) if has_name else f"{target.__module__}:{target.__qualname__}",
        "args": write(node.args, _written),
        "kwargs": write(node.kwargs, _written),
        "meta": write(meta, _written),
    }


def _function(name: str) -> Callable[..., Any]:
    """The function or operator of a node; raises PassError for one that no graph calls."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name.count(".") != 2 or ":" in name:
        names = ", ".join(_FUNCTIONS)
        raise PassError(f"{name} is no operator of torch, and none of the functions {names}")
    namespace, operator, overload = name.split(".")
    try:
        called = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    except (AttributeError, RuntimeError) as failure:
        raise PassError(
            f"cannot find {name}: {failure}; import the module that defines it"
        ) from failure
    if not isinstance(called, OpOverload) or not _computes(called):
        raise PassError(f"{name} is no operator that graphs call")
    return called


def _computes(operator: OpOverload) -> bool:
    """Whether an operator makes tensors, from no file: others act on the machine or the process."""
    schema = operator._schema
    makes_tensors = any("Tensor" in str(each.type) for each in schema.returns)
    # Any overload may open a file, so the schema decides instead of a list of operators.
    return makes_tensors and _FILES.isdisjoint(each.name for each in schema.arguments)


def _written(value: Any) -> str:
    """The text of a node or a tensor."""
    match value:
        case fx.Node():
            return f"Node({value.name!r})"
        case FakeTensor():
            layout = tuple(value.shape), value.stride(), value.storage_offset()
            return f"FakeTensor{write((*layout, value.dtype, value.device))}"
        case torch.Tensor():
            data = value.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
            text = base64.b64encode(data).decode("ascii")
            return f"Constant{write((text, tuple(value.shape), value.dtype, value.device))}"
    raise PassError(f"{type(value).__name__} has no text: {value!r}")


def _fake_tensor(
    mode: FakeTensorMode, shape: Dims, stride: Dims, offset: int, dtype: Any, device: torch.device
) -> torch.Tensor:
    with mode:
        if not offset:
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        size = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        return torch.empty(size, dtype=dtype, device=device).as_strided(shape, stride, offset)


def _constant(data: str, shape: Dims, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    values = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=dtype).view(shape)
    return values if device.type == "cpu" else values.to(device)
