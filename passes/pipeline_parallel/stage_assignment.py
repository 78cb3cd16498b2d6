"""`StageAssignment`: the stage of each operator, and the stage that returns each output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.errors import StrategyError
from autopar.ir.graph import TrainingGraph, has_batch_dim, tensors
from autopar.ir.roles import (
    BatchTotal,
    Gradient,
    Input,
    MicrobatchPartial,
    Output,
    OutputRole,
    Update,
)
from autopar.passes.core.collective_ops import is_name
from autopar.passes.core.node_builder import aten
from autopar.passes.pipeline_parallel.place_stages import backward_stage
from autopar.passes.pipeline_parallel.stage_dependence import (
    LAYOUT_OPS,
    Dependence,
    dependences,
    op_packet,
)


@dataclass(frozen=True)
class StageAssignment:
    """Stages of the operators and outputs of a graph.

    Attributes:
        graph: the graph to split.
        num_stages: number of stages.
        dependence: dependence of each node.
        stage: stage of each operator that a single stage runs.
        outputs: for each stage, the terms of each output that it returns.
        prologue: partial sums that depend on inputs alone.
        epilogue: outputs computed from totals over the batch.
        skipped: sums of gradients of several stages, which no stage computes.
    """

    graph: TrainingGraph
    num_stages: int
    dependence: Mapping[fx.Node, Dependence]
    stage: Mapping[fx.Node, int]
    outputs: Sequence[Mapping[OutputRole, tuple[fx.Node, ...]]]
    prologue: Mapping[OutputRole, fx.Node]
    epilogue: Mapping[OutputRole, fx.Node]
    skipped: frozenset[fx.Node]

    def computes(self, stage: int, node: fx.Node) -> bool:
        """Whether a stage computes a node itself."""
        own = self.stage.get(node, stage)
        if own >= stage or op_packet(node) not in LAYOUT_OPS or node.meta["phase"] == "backward":
            return own == stage
        source = node.args[0]  # later stages compute a view of a value that they receive
        if not isinstance(source, fx.Node) or source not in self.stage:
            return False
        before, after = tensors(source)[0], tensors(node)[0]
        return before.numel() == after.numel() and before.dtype == after.dtype


def assign_stages(graph: TrainingGraph, num_stages: int) -> StageAssignment:
    """Assigns every operator and output to a stage; updates `meta["stage"]` in place.

    Raises:
        StrategyError: a stage is empty, or the model changes an argument in place.
    """
    dependence = dependences(graph)
    stage: dict[fx.Node, int] = {}
    for node in graph.calls():
        if dependence[node] != "staged":
            continue
        own = node.meta.get("stage")
        if node.meta["phase"] == "backward":
            own = backward_stage(node, own, dependence, num_stages)
        else:  # the recorded stage, or a later one that an operand requires
            earliest = max((stage[n] for n in node.all_input_nodes if n in stage), default=0)
            own = earliest if own is None or is_name(node) else max(own, earliest)
        stage[node] = node.meta["stage"] = own
    empty = sorted(set(range(num_stages)) - set(stage.values()))
    if empty:
        raise StrategyError(
            f"stage {empty[0]} of {num_stages} has nothing to do: the model has fewer layers "
            "than stages. Give a smaller pp or stages_per_rank."
        )
    outputs: list[dict[OutputRole, tuple[fx.Node, ...]]] = [{} for _ in range(num_stages)]
    prologue: dict[OutputRole, fx.Node] = {}
    epilogue: dict[OutputRole, fx.Node] = {}
    skipped: set[fx.Node] = set()
    for role, result in zip(graph.outputs, graph.results, strict=True):
        if result is None:
            continue
        own = stage.get(result, num_stages - 1)
        match role:
            case MicrobatchPartial(index) if BatchTotal(index, False) in graph.inputs:
                prologue[role] = result
            case MicrobatchPartial():
                outputs[own][role] = (result,)
            case Update(Input(index)):
                raise StrategyError(
                    f"the model changes argument {index} in place, which a pipeline cannot do for "
                    "the caller: change a copy, or leave pp and micro_batches out"
                )
            case Gradient():
                for term in _gradient_terms(result, stage, skipped):
                    at = stage.get(term, num_stages - 1)
                    outputs[at][role] = (*outputs[at].get(role, ()), term)
            case Output() if dependence[result] != "totals" and (
                has_batch_dim(result) or tensors(result)[0].dim()
            ):
                outputs[own][role] = (result,)
            case _:
                epilogue[role] = result
    return StageAssignment(
        graph, num_stages, dependence, stage, outputs, prologue, epilogue, frozenset(skipped)
    )


def _gradient_terms(
    gradient: fx.Node, stage: Mapping[fx.Node, int], skipped: set[fx.Node]
) -> Iterator[fx.Node]:
    """The terms of a gradient by stage; adds sums that nothing else reads to `skipped`."""
    if op_packet(gradient) is aten.add and gradient.meta["phase"] == "backward":
        terms = [n for n in gradient.args if isinstance(n, fx.Node) and n in stage]
        types = {(t.shape, t.dtype) for n in (*terms, gradient) for t in tensors(n)[:1]}
        if len(terms) == 2 and len(types) == 1 and any(stage[n] != stage[gradient] for n in terms):
            if skipped.issuperset(n for n in gradient.users if n.op != "output"):
                skipped.add(gradient)
            for term in terms:
                yield from _gradient_terms(term, stage, skipped)
            return
    yield gradient
