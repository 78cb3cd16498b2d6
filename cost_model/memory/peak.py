"""`simulate_memory`: bytes of one training step on one rank, point by point, and their peak.

The pieces of memory come from `liveness`. They are requested from a model of the device's
allocator (`allocator`), which rounds sizes and tells reserved from allocated bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.core.ir.graph import TrainingGraph
from autopar.cost_model.memory.allocator import allocator_of, context_bytes, workspace_bytes
from autopar.cost_model.memory.growth import Parts, parts_of_step
from autopar.cost_model.memory.liveness import ALWAYS, CATEGORIES, Overhead, Span, memory_spans

UPDATE = "optimizer step"
"""Name of the last point of the curve."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory of a steady step on one rank: every step but the first.

    Attributes:
        device: "cpu", or the name of the GPU.
        peak: most bytes of tensors at once; on a GPU as `torch.cuda.memory_allocated` counts.
        peak_node: operator at the peak, or UPDATE.
        by_category: bytes of each of CATEGORIES at the peak.
        reserved: most bytes that torch's allocator has taken from the device.
        context: modelled bytes that the process takes of a GPU beside that (see `allocator`).
        nodes: points of the curve: every operator of `graph.calls()`, then UPDATE.
        table: int64 [CATEGORIES, nodes], bytes of each category at each point.
        forward: number of points before the backward.
    """

    device: str
    peak: int
    peak_node: str
    by_category: Mapping[str, int]
    reserved: int
    context: int
    nodes: tuple[str, ...]
    table: NDArray[np.int64]
    forward: int

    @property
    def parts(self) -> Parts:
        """Memory of the parts of the step."""
        points = np.arange(len(self.nodes) - 1)
        forward = points < self.forward
        start = np.where(forward, 0, self.forward)
        length = np.where(forward, self.forward, len(points) - self.forward)
        return parts_of_step(self.table, forward, (points - start) / length)

    @property
    def curve(self) -> tuple[int, ...]:
        """Bytes that exist at each of `nodes`."""
        return tuple(self.table.sum(axis=0).tolist())

    @property
    def needed(self) -> int:
        """Bytes that count against a cap: reserved ones on a GPU, those of tensors on a CPU."""
        return self.peak if self.device == "cpu" else self.reserved


def simulate_memory(graph: TrainingGraph, overhead: Overhead | None = None) -> Memory:
    """The memory of one training step of a lowered graph.

    `overhead` is the memory beside its tensors; by default AdamW's state on a CPU.
    """
    overhead = overhead or Overhead()
    spans = memory_spans(graph, overhead)
    nodes = list(graph.graph.nodes)
    device = "cuda" if overhead.device != "cpu" else "cpu"
    sizes, reserved = _allocate(spans, len(nodes) + 1, device, workspace_bytes(overhead.device))
    changes = np.zeros((len(CATEGORIES), len(nodes) + 2), dtype=np.int64)
    for span, nbytes in zip(spans, sizes, strict=True):
        row = _ROW[span.category]
        changes[row, max(span.start, 0)] += nbytes
        changes[row, span.end + 1] -= nbytes
        for first, last in span.flights:
            for kind, sign in ((_ROW["in flight"], 1), (row, -1)):
                changes[kind, first] += sign * nbytes
                changes[kind, last + 1] -= sign * nbytes
    changes[_ROW["buffers"], 0] += workspace_bytes(overhead.device)
    points = [i for i, node in enumerate(nodes) if node.op == "call_function"] + [len(nodes)]
    table = changes.cumsum(axis=1)[:, points]
    total = table.sum(axis=0)
    peak = int(total.argmax())
    names = (*(nodes[i].name for i in points[:-1]), UPDATE)
    backward = nodes.index(graph.backward_start)
    return Memory(
        device=overhead.device,
        peak=int(total[peak]),
        peak_node=names[peak],
        by_category={name: int(table[row, peak]) for name, row in _ROW.items()},
        reserved=reserved,
        context=context_bytes(overhead.device),
        nodes=names,
        table=table,
        forward=sum(point < backward for point in points[:-1]),
    )


_ROW = {name: row for row, name in enumerate(CATEGORIES)}


def _allocate(
    spans: Sequence[Span], points: int, device: str, workspace: int
) -> tuple[list[int], int]:
    """Allocates the spans of two steps in a row; all later steps are like the second.

    `workspace` bytes are allocated first and never freed. Returns the bytes of each span in the
    second step, and the most bytes reserved during it.
    """
    allocator = allocator_of(device)
    starting: list[list[int]] = [[] for _ in range(points)]
    ending: list[list[int]] = [[] for _ in range(points)]
    addresses, sizes = [0] * len(spans), [0] * len(spans)
    optimizer_state: list[int] = []  # allocated in the first step

    def allocate(indices: Sequence[int]) -> None:
        for index in indices:
            addresses[index] = allocator.malloc(spans[index].nbytes)
            sizes[index] = allocator.size(addresses[index])

    allocator.malloc(workspace)
    for index, span in enumerate(spans):
        if span.start != ALWAYS:
            starting[span.start].append(index)
            ending[span.end].append(index)
        elif span.category == "optimizer":
            optimizer_state.append(index)
        else:
            allocate([index])
    for step in range(2):
        reserved = allocator.reserved
        for point in range(points):
            allocate(starting[point])
            reserved = max(reserved, allocator.reserved)
            if point == points - 1 and step == 0:
                allocate(optimizer_state)
            for index in ending[point]:
                allocator.free(addresses[index])
    return sizes, reserved
