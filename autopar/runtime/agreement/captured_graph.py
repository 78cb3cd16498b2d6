"""The captured graph, compared over all ranks: so are the code of forward and of loss_fn."""

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
from autopar.errors import DisagreementError
from autopar.ir.graph import TrainingGraph, source_line, tensors
from autopar.ir.roles import Parameter
from autopar.plan.spec import SCHEMA_VERSION
from autopar.runtime.agreement.consensus import gather_objects, is_multi_rank

MAX_SAMPLE_BYTES = 1 << 20
"""Bytes of a constant that are compared."""

SOURCE = "  # "

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
    """Raises if the ranks captured different graphs; all call it at once.

    Args:
        graph: as captured on this rank.
        even: whether all ranks captured it at the same number of rows.

    Raises:
        DisagreementError: on every rank, with the first difference.
    """
    if not is_multi_rank():
        return
    lines = described(graph) if even else described_at_any_rows(graph)
    event = "compares the captured graph"
    digests = gather_objects(digest_of(lines), event)
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if not odd:
        return
    theirs = gather_objects(lines, event)
    pairs = zip_longest(theirs[0], theirs[odd[0]], fillvalue="nothing more")
    one, other = next((a, b) for a, b in pairs if without_source(a) != without_source(b))
    raise DisagreementError(
        f"rank(s) {odd} run another forward or loss_fn than rank 0. First difference: {other} on "
        f"rank {odd[0]}, {one} on rank 0. Run the same code with the same attributes on every "
        "rank, and let nothing in forward depend on the rank."
    )


def digest_of(lines: list[str]) -> str:
    """A hash of what a graph computes, from whichever line of code."""
    return hashlib.sha256("\n".join(map(without_source, lines)).encode()).hexdigest()


def without_source(line: str) -> str:
    """A line about an operator without the user's line."""
    return line.partition(SOURCE)[0]


def described(graph: TrainingGraph) -> list[str]:
    """One line for each input, operator, output and constant, alike in every process."""
    numbers = {node: index for index, node in enumerate(graph.graph.nodes)}
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    lines = []
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        what = roles.get(node) or node.target
        given = [_text((node.args, node.kwargs), numbers)] if node.op == "call_function" else []
        made = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors(node))
        line = " ".join([f"%{numbers[node]} = {what}", *given, made])
        lines.append(line + (SOURCE + source_line(node) if source_line(node) else ""))
    for role, result in zip(graph.outputs, graph.results, strict=True):
        lines.append(f"{role} = {_text(result, numbers)}")
    return lines + [f"constant {n} of {_content(t)}" for n, t in graph.constants.items()]


def described_at_any_rows(graph: TrainingGraph) -> list[str]:
    """One line for each parameter, result and constant: those do not depend on rows."""
    lines = [str(role) for role in graph.inputs if isinstance(role, Parameter)]
    lines += sorted(map(str, graph.outputs))
    return lines + [f"constant {n} of {_content(t)}" for n, t in graph.constants.items()]


def _text(value: Any, numbers: Mapping[fx.Node, int]) -> str:
    """An argument of an operator; of an object of any other kind, its class."""
    if isinstance(value, fx.Node):
        return f"%{numbers[value]}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(_text(item, numbers) for item in value)})"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}={_text(v, numbers)}" for k, v in value.items())
    return repr(value) if value is None or isinstance(value, PLAIN) else type(value).__qualname__


def _content(tensor: torch.Tensor) -> str:
    """Type, shape and a hash of the bytes, of a sample where there are many."""
    kind = f"{str(tensor.dtype)[6:]}{list(tensor.shape)}"
    if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
        return kind
    flat = tensor.detach().reshape(-1)
    few = flat[:: max(1, flat.numel() * flat.element_size() // MAX_SAMPLE_BYTES)]
    return f"{kind} {zlib.crc32(few.cpu().contiguous().view(torch.uint8).numpy().data):08x}"
