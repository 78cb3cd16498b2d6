"""`simulate_memory`: the bytes of one training step on one rank, point by point, and their peak.

The pieces of memory are those of `liveness`, from the first node of the forward to the end of the
optimizer's step. They are asked of the device's own allocator (`allocator`), so that its rounding
is in, and so that what is reserved can be told from what is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_model.memory.allocator import allocator_of, context_bytes, workspace_bytes
from autopar.cost_model.memory.liveness import ALWAYS, CATEGORIES, Overhead, Span, memory_spans
from autopar.ir.graph import TrainingGraph

UPDATE = "optimizer step"
"""The name of the last point of the curve."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of a steady step on one rank: every step but the first.

    Attributes:
        device: "cpu", or the name of the GPU.
        peak: the most bytes that tensors hold at once; on a GPU as `torch.cuda.memory_allocated`
            counts them.
        peak_node: the operator during which they do, or UPDATE.
        by_category: the bytes of each of CATEGORIES then.
        reserved: the most that torch's allocator has taken from the device.
        context: what the process takes of a GPU beside that, modelled (`allocator`).
        nodes: the points of the curve: every operator of `graph.calls()`, then UPDATE.
        table: int64, one row for each of CATEGORIES, one column for each of `nodes`: bytes that
            exist while it runs.
    """

    device: str
    peak: int
    peak_node: str
    by_category: Mapping[str, int]
    reserved: int
    context: int
    nodes: tuple[str, ...]
    table: NDArray[np.int64]

    @property
    def curve(self) -> tuple[int, ...]:
        """The bytes that exist while each of `nodes` runs."""
        return tuple(self.table.sum(axis=0).tolist())

    @property
    def needed(self) -> int:
        """What has to fit under a cap: the bytes reserved on a GPU, those of tensors on a CPU."""
        return self.peak if self.device == "cpu" else self.reserved


def simulate_memory(graph: TrainingGraph, overhead: Overhead | None = None) -> Memory:
    """The memory of one training step.

    Args:
        graph: a lowered graph.
        overhead: what is allocated beside its tensors; by default AdamW's state on a CPU.
    """
    overhead = overhead or Overhead()
    spans = memory_spans(graph, overhead)
    nodes = list(graph.graph.nodes)
    device = "cuda" if overhead.device != "cpu" else "cpu"
    sizes, reserved = _allocate(spans, len(nodes) + 1, device, workspace_bytes(overhead.device))
    changes = np.zeros((len(CATEGORIES), len(nodes) + 2), dtype=np.int64)
    for span, nbytes in zip(spans, sizes, strict=True):
        _add(changes, span, nbytes)
    changes[_ROW["buffers"], 0] += workspace_bytes(overhead.device)
    points = [i for i, node in enumerate(nodes) if node.op == "call_function"] + [len(nodes)]
    table = changes.cumsum(axis=1)[:, points]
    total = table.sum(axis=0)
    peak = int(total.argmax())
    names = (*(nodes[i].name for i in points[:-1]), UPDATE)
    return Memory(
        device=overhead.device,
        peak=int(total[peak]),
        peak_node=names[peak],
        by_category={name: int(table[row, peak]) for name, row in _ROW.items()},
        reserved=reserved,
        context=context_bytes(overhead.device),
        nodes=names,
        table=table,
    )


_ROW = {name: row for row, name in enumerate(CATEGORIES)}


def _add(changes: NDArray[np.int64], span: Span, nbytes: int) -> None:
    """Write when a span begins and ends, in its category or in flight."""
    start = max(span.start, 0)
    row = _ROW[span.category]
    changes[row, start] += nbytes
    changes[row, span.end + 1] -= nbytes
    for first, last in span.flights:
        for kind, sign in ((_ROW["in flight"], 1), (row, -1)):
            changes[kind, first] += sign * nbytes
            changes[kind, last + 1] -= sign * nbytes


def _allocate(
    spans: Sequence[Span], points: int, device: str, workspace: int
) -> tuple[list[int], int]:
    """What the allocator makes of two steps in a row, of which the second is like all later ones.

    Args:
        spans: in the order in which they are allocated.
        points: number of points of time.
        device: "cpu" or "cuda".
        workspace: bytes allocated before everything else and kept.

    Returns:
        The bytes of each span in the second step, and the most that was reserved during it.
    """
    allocator = allocator_of(device)
    begins: list[list[int]] = [[] for _ in range(points)]
    ends: list[list[int]] = [[] for _ in range(points)]
    addresses = [0] * len(spans)
    sizes = [0] * len(spans)
    late: list[int] = []

    def place(index: int) -> None:
        addresses[index] = allocator.malloc(spans[index].nbytes)
        sizes[index] = allocator.size(addresses[index])

    allocator.malloc(workspace)
    for index, span in enumerate(spans):
        if span.start != ALWAYS:
            begins[span.start].append(index)
            ends[span.end].append(index)
        elif span.category == "optimizer":  # made when it first steps
            late.append(index)
        else:
            place(index)
    for step in range(2):
        reserved = allocator.reserved
        for point in range(points):
            for index in begins[point]:
                place(index)
            reserved = max(reserved, allocator.reserved)
            if point == points - 1 and step == 0:
                for index in late:
                    place(index)
            for index in ends[point]:
                allocator.free(addresses[index])
    return sizes, reserved
