"""Turns abstract collectives into torch's functional ones, as the backend does them best."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.graph import GraphProperty, TrainingGraph
from autopar.ir.mesh_levels import axis_of_level, coordinate_on
from autopar.passes.communication.lower_functional import Lowering
from autopar.passes.communication.lower_gloo import GlooLowering
from autopar.passes.core.collective_ops import axis_of, starts
from autopar.passes.core.pass_base import Pass, PassResult


def emitted(kind: str, backend: str) -> str:
    """The collective that one of a kind becomes, message sizes being the same."""
    exchanged = backend == "gloo" and kind in ("all_gather", "reduce_scatter")
    return "all_to_all" if exchanged else kind


@dataclass(frozen=True)
class LowerCollectives(Pass):
    """Writes every collective as copies into a buffer, one functional collective, and views.

    Before: abstract collectives. After: none; functional collectives named by their axis, each
    waited for once. Chunks are padded to equal size. On gloo, gathers and reduce-scatters are
    exchanges of what others lack (see `lowering_gloo`). Tier: exact.

    Attributes:
        backend: "gloo", "nccl" or another torch.distributed backend.
        rank: this rank's place on the axis.
        axis: lower only the collectives of this axis and its levels; "" for all, where there is
            but one.
    """

    backend: str
    rank: int
    axis: str = ""
    ensures = frozenset({GraphProperty.COLLECTIVES_LOWERED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        graph = graph.copy()
        pending = [s for s in starts(graph) if self.axis in ("", axis_of_level(axis_of(s)))]
        if not pending:
            return PassResult(graph, "there is no collective")
        lowering = GlooLowering if self.backend == "gloo" else Lowering
        for start in pending:
            place = coordinate_on(axis_of(start), self.rank, graph.axes)
            lowering(graph, start, place).run()
        return PassResult(graph)
