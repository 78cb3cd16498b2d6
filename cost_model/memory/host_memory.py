"""`HostMemory`: pinned memory of the host that a GPU's program takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.core.common.block_storage import round_up
from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.messages import TO_HOST, WRITE, is_stored, transfer_of

PASSING = 4
"""Values on their way to and from files at once: two of the largest, each way."""


@dataclass(frozen=True)
class HostMemory:
    """Pinned bytes of one rank.

    Attributes:
        standing: bytes of parameters, and of values on their way to and from files.
        saved: bytes of the activations of one micro-batch.
    """

    standing: int = 0
    saved: int = 0

    @staticmethod
    def of(graph: TrainingGraph, *, on_gpus: bool) -> HostMemory:
        """The memory of a lowered graph, captured on any device; none on CPUs."""
        if not on_gpus:
            return HostMemory()
        kinds = {node: transfer_of(node) for node in graph.calls()}
        moved = {
            wanted: [node.args[0] for node, kind in kinds.items() if kind == wanted]
            for wanted in (TO_HOST, WRITE)
        }
        largest = max(map(_nbytes, moved[WRITE]), default=0)
        stored = map(_nbytes, filter(is_stored, graph.placeholders))
        return HostMemory(sum(stored) + PASSING * largest, sum(map(_nbytes, moved[TO_HOST])))


def _nbytes(node: object) -> int:
    """Bytes of a value in whole pages."""
    assert isinstance(node, fx.Node)
    return round_up(tensor_bytes(tensors(node)[0]))
