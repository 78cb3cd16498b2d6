"""`CutPoints`: possible stage boundaries of a model, and the `Segment`s between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.messages import collective_of
from autopar.core.ir.roles import Gradient, Parameter
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.passes.pipeline_parallel.stage_dependence import (
    LAYOUT_OPS,
    ParameterUse,
    dependences,
    op_packet,
)
from autopar.planner.evaluate.stage_partition import Segment

Uses = tuple[tuple[str, tuple[int, ...]], ...]
"""An index for each use of each parameter."""


@dataclass(frozen=True)
class CutPoints:
    """Possible stage boundaries of a model: before each operator that uses a parameter.

    Attributes:
        names: parameters used between each cut point and the next.
        uses: cut point of each use of each parameter.
    """

    names: tuple[tuple[str, ...], ...]
    uses: Uses

    @staticmethod
    def of(found: Iterable[ParameterUse], parameters: Iterable[str]) -> CutPoints:
        names: dict[fx.Node, list[str]] = {}
        table: dict[str, list[int]] = {name: [] for name in parameters}
        for use in found:
            names.setdefault(use.node, []).append(use.name)
            table[use.name].append(len(names) - 1)
        uses = ((name, tuple(at) or (0,)) for name, at in table.items())
        return CutPoints(tuple(map(tuple, names.values())), tuple(uses))

    def stages(self, cuts: Sequence[int]) -> Uses:
        """Stage of each use of each parameter, given the first cut point of each later stage."""
        return tuple(
            (name, tuple(sum(cut <= place for cut in cuts) for place in at))
            for name, at in self.uses
        )


def segments_of(
    graph: TrainingGraph, cut_points: CutPoints, seconds: Sequence[float], copies: float
) -> list[Segment]:
    """Segments of a graph that has a stage for each cut point, with the seconds of each.

    The bytes of a parameter count `copies` times, for its gradient and optimizer state.
    """
    kinds, at = dependences(graph), _stages(graph)
    returned = {n for r, n in zip(graph.outputs, graph.results, strict=True)
                if n is not None and isinstance(r, Gradient)}  # fmt: skip
    count = len(cut_points.names)
    saved, held = [0] * count, [0.0] * count
    crossing = {phase: [0] * (count + 1) for phase in ("forward", "backward")}
    reach = _last_readers(graph, at, returned)
    for node, place in at.items():
        if kinds[node] != "staged" or _is_recomputed_view(node, at):
            continue
        nbytes, phase = sum(map(tensor_bytes, tensors(node))), node.meta["phase"]
        first, last = sorted((place, reach[node]))
        if first < last:  # differences, turned into running sums below
            crossing[phase][first + 1] += nbytes
            crossing[phase][last + 1] -= nbytes
        if phase == "forward" and any(n.meta.get("phase") == "backward" for n in node.users):
            saved[place] += nbytes
    uses = dict(cut_points.uses)
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        if isinstance(role, Parameter):
            held[uses[role.name][0]] += copies * tensor_bytes(tensors(node)[0])
    sent, back = (list(accumulate(crossing[phase])) for phase in ("forward", "backward"))
    return [Segment(seconds[i], round(held[i]), saved[i], sent[i], back[i]) for i in range(count)]


def seconds_of(
    graph: TrainingGraph,
    cut_points: CutPoints,
    cluster: Cluster,
    operators: OperatorTimes,
    excluded_axis: str,
) -> list[float]:
    """Seconds from each cut point of a lowered graph to the next, forward and backward.

    Collectives along `excluded_axis` are ignored, because they run once per step.
    """
    found, operators = [0.0] * len(cut_points.names), operators.of(graph)
    for node, place in _stages(graph).items():
        found[place] += operators.seconds(node).seconds
        if collective_of(node) is not None:
            sent = Transfer.of(node, graph.axes, cluster.ranks_per_node)
            if sent.axis != excluded_axis:
                found[place] += cluster.price(sent).seconds
    return found


def _stages(graph: TrainingGraph) -> dict[fx.Node, int]:
    """Stage of every operator; an operator without a stage inherits it from its inputs."""
    found: dict[fx.Node, int] = {}
    for node in graph.calls():
        read = [found[n] for n in node.all_input_nodes if n in found]
        late = node.meta["phase"] == "backward"
        place = node.meta.get("stage")
        found[node] = (min if late else max)(read, default=0) if place is None else place
    return found


def _last_readers(
    graph: TrainingGraph, at: Mapping[fx.Node, int], returned: set[fx.Node]
) -> dict[fx.Node, int]:
    """Furthest stage that reads each value: the last for forward values, else the first.

    Later stages recompute views, and gradient sums run on the stage that returns them.
    """
    found: dict[fx.Node, int] = {}
    for node in reversed(list(at)):
        users = [n for n in node.users if n in at and n not in returned]
        places = [found[n] if _is_recomputed_view(n, at) else at[n] for n in users]
        backward = node.meta["phase"] == "backward"
        found[node] = (min if backward else max)([at[node], *places])
    return found


def _is_recomputed_view(node: fx.Node, at: Mapping[fx.Node, int]) -> bool:
    """Whether a forward value is a view that later stages recompute from its source."""
    source = node.args[0] if node.args else None
    return (
        op_packet(node) in LAYOUT_OPS
        and node.meta["phase"] == "forward"
        and isinstance(source, fx.Node)
        and source in at
        and sum(map(tensor_bytes, tensors(source))) == sum(map(tensor_bytes, tensors(node)))
    )
