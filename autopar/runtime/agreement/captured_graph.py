"""Compares the captured graph, and so the code of forward and loss_fn, across ranks."""

from __future__ import annotations

import hashlib
import sys
import zlib
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensor
from autopar.core.ir.graph import TrainingGraph, source_line, tensors
from autopar.core.ir.roles import Parameter
from autopar.core.plan.upgrade import SCHEMA_VERSION
from autopar.errors import DisagreementError
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank
from autopar.runtime.batch_checks import sampled_bytes

SOURCE = "  # "
"""Separator between an operator and the user's line."""

PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)


def versions() -> dict[str, object]:
    """Versions that must be equal on all ranks."""
    autopar = sys.modules["autopar"]
    return {
        "version of torch": torch.__version__,
        "version of autopar": getattr(autopar, "__version__", "unknown"),
        "version of the plan schema": SCHEMA_VERSION,
    }


def agree_on_graph(graph: TrainingGraph, *, even: bool) -> None:
    """Raises DisagreementError on every rank if graphs differ; all ranks call it at once."""
    if not is_multi_rank():
        return
    lines = describe(graph) if even else _describe_without_rows(graph)
    event = "compares the captured graph"
    shown = "\n".join(map(without_source, lines))
    digests = gather_objects(hashlib.sha256(shown.encode()).hexdigest(), event)
    odd = [rank for rank, value in enumerate(digests) if value != digests[0]]
    if not odd:
        return
    gathered = gather_objects(lines, event)
    pairs = zip_longest(gathered[0], gathered[odd[0]], fillvalue="nothing more")
    one, other = next((a, b) for a, b in pairs if without_source(a) != without_source(b))
    raise DisagreementError(
        f"rank(s) {odd} run another forward or loss_fn than rank 0. First difference: {other} on "
        f"rank {odd[0]}, {one} on rank 0. Run the same code with the same attributes on every "
        "rank, and let nothing in forward depend on the rank."
    )


def without_source(line: str) -> str:
    """A line about an operator without the user's line of code."""
    return line.partition(SOURCE)[0]


def describe(graph: TrainingGraph) -> list[str]:
    """One line for each input, operator, output and constant, equal in every process."""
    numbers = {node: index for index, node in enumerate(graph.graph.nodes)}
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    lines = []
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        target = roles.get(node) or node.target
        arguments = [_text((node.args, node.kwargs), numbers)] if node.op == "call_function" else []
        results = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors(node))
        line = " ".join([f"%{numbers[node]} = {target}", *arguments, results])
        lines.append(line + (SOURCE + source_line(node) if source_line(node) else ""))
    for role, result in zip(graph.outputs, graph.results, strict=True):
        lines.append(f"{role} = {_text(result, numbers)}")
    return lines + _constants(graph)


def _describe_without_rows(graph: TrainingGraph) -> list[str]:
    """One line for each parameter, result and constant, which do not depend on rows."""
    lines = [str(role) for role in graph.inputs if isinstance(role, Parameter)]
    lines += sorted(map(str, graph.outputs))
    return lines + _constants(graph)


def _constants(graph: TrainingGraph) -> list[str]:
    return [f"constant {name} of {_content(x)}" for name, x in graph.constants.items()]


def _text(value: Any, numbers: Mapping[fx.Node, int]) -> str:
    """An argument of an operator; for objects of unknown classes, the class."""
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_text(item, numbers) for item in value)})"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_text(v, numbers)}" for k, v in value.items())
    return repr(value) if value is None or isinstance(value, PLAIN) else type(value).__qualname__


def _content(tensor: torch.Tensor) -> str:
    """Dtype, shape and a hash of the bytes, or of a sample of many."""
    kind = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return kind
    return f"{kind} {zlib.crc32(sampled_bytes(tensor)):08x}"
