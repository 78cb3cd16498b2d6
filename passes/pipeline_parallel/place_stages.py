"""`PlaceStages`: the pipeline stage of every operator.

A stage follows from the parameter uses and sequence numbers of the captured graph. It is recorded
first, so that operators that later passes write can take it over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.core.ir.graph import GraphProperty, TrainingGraph
from autopar.passes.core.collective_ops import is_name
from autopar.passes.core.node_builder import aten
from autopar.passes.core.pass_base import Pass, PassResult
from autopar.passes.pipeline_parallel.stage_dependence import (
    Dependence,
    dependences,
    forward_stages,
    op_packet,
    parameter_uses,
)


@dataclass(frozen=True)
class PlaceStages(Pass):
    """Records `meta["stage"]` on every operator that a single stage runs.

    Before: a captured graph. After: a forward operator has the stage of the last parameter use
    before it, and a backward operator has the stage of its forward operator. Later passes copy the
    stage to new operators. Tier: exact.

    Attributes:
        uses: for each parameter, the stage of each of its uses.
        stages: number of stages.
    """

    uses: tuple[tuple[str, tuple[int, ...]], ...]
    stages: int
    ensures = frozenset({GraphProperty.STAGES_PLACED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        forward = forward_stages(graph, dict(self.uses))
        for node, stage in forward.items():
            node.meta["stage"] = stage
        stage_of_seq_nr = _stages_of_seq_nrs(graph, forward)
        found = dependences(graph)
        for node in graph.calls():
            if node.meta["phase"] == "backward" and found[node] == "staged":
                wanted = stage_of_seq_nr.get(node.meta["seq_nr"])
                node.meta["stage"] = backward_stage(node, wanted, found, self.stages)
        return PassResult(graph)


def _stages_of_seq_nrs(
    graph: TrainingGraph, stages: Mapping[fx.Node, int]
) -> dict[int | None, int]:
    """The stage of the forward operator that autograd gave each sequence number.

    Other operators carry the number too: copies of rows before it, and operators without gradients
    behind it. Only the first reader of a trainable parameter can have its gradient.
    """
    trained = [
        use.node for use in parameter_uses(graph) if graph.parameters[use.name].requires_grad
    ]
    first: dict[int | None, int] = {}
    for node in (*(node for node in trained if node in stages), *stages):
        first.setdefault(node.meta["seq_nr"], stages[node])
    return first


def backward_stage(
    node: fx.Node,
    wanted: int | None,
    dependence: Mapping[fx.Node, Dependence],
    stages: int,
) -> int:
    """The stage of a backward operator, given the stages of its operands.

    Gradients move to lower stages and forward values to higher ones, which bounds the stage from
    both sides. A sum of gradients runs on the lower stage of its terms. Without a `wanted` stage it
    is the highest possible of `stages`.
    """
    staged = [n for n in node.all_input_nodes if dependence[n] == "staged"]
    gradients = [n for n in staged if n.meta["phase"] == "backward"]
    highest = min((n.meta["stage"] for n in gradients), default=stages - 1)
    lowest = max((n.meta["stage"] for n in staged if n not in gradients), default=0)
    is_sum = op_packet(node) is aten.add and len(gradients) == 2
    if wanted is None or is_sum or is_name(node):
        wanted = highest
    return max(lowest, min(wanted, highest))
