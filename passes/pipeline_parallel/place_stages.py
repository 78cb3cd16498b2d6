"""Says of every operator which stage of a pipeline it runs on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.ir.graph import TrainingGraph
from autopar.passes.core.collective_ops import is_name
from autopar.passes.core.node_builder import aten
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.pipeline_parallel.stage_dependence import (
    Dependence,
    dependences,
    forward_stages,
    op_packet,
)


@dataclass(frozen=True)
class PlaceStages(Pass):
    """Writes `meta["stage"]` on every operator that only one stage runs.

    Before: the graph as captured. After: an operator of the forward has the stage of the last use
    of a parameter before it; one of the backward that of its forward. Passes that follow give
    what they write the stage of the operator that they write it for. Tier: exact.

    Attributes:
        uses: for each parameter, the stage of each of its uses.
        stages: how many there are.
    """

    uses: tuple[tuple[str, tuple[int, ...]], ...]
    stages: int

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        graph = graph.copy()
        forward = forward_stages(graph, dict(self.uses))
        owners: dict[int, int] = {}
        for node, stage in forward.items():
            node.meta["stage"] = stage
            owners.setdefault(node.meta["seq_nr"], stage)
        kinds = dependences(graph)
        for node in graph.calls():
            if node.meta["phase"] == "backward" and kinds[node] == "staged":
                wanted = owners.get(node.meta["seq_nr"])
                node.meta["stage"] = backward_stage(node, wanted, kinds, self.stages)
        return PassResult(graph)


def backward_stage(
    node: fx.Node, wanted: int | None, kinds: dict[fx.Node, Dependence], stages: int
) -> int:
    """The stage of an operator of the backward, all before it having theirs.

    Gradients flow down the stages, values of the forward have flowed up. Between these, it is the
    stage wanted; sums of gradients are where the later of them comes from.
    """
    staged = [n for n in node.all_input_nodes if kinds[n] == "staged"]
    late = [n for n in staged if n.meta["phase"] == "backward"]
    highest = min((n.meta["stage"] for n in late), default=stages - 1)
    lowest = max((n.meta["stage"] for n in staged if n not in late), default=0)
    is_sum = op_packet(node) is aten.add and len(late) == 2
    if wanted is None or is_sum or is_name(node):
        wanted = highest
    return max(lowest, min(wanted, highest))
