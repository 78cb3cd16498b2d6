"""Segments of a model: what it does between two uses of parameters, and what crosses there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer, collective_of
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.ir.roles import Gradient, Parameter
from autopar.passes.pipeline_parallel.stage_dependence import (
    LAYOUT_OPS,
    ParameterUse,
    dependences,
    op_packet,
)
from autopar.planner.evaluate.stage_partition import Segment

Uses = tuple[tuple[str, tuple[int, ...]], ...]
"""For each parameter, a number for each of its uses."""


@dataclass(frozen=True)
class CutPoints:
    """Where a model may be cut: before each operator that uses a parameter.

    Attributes:
        names: the parameters that are used from each place on, up to the next.
        uses: for each parameter, the place of each of its uses.
    """

    names: tuple[tuple[str, ...], ...]
    uses: Uses

    @staticmethod
    def of(found: Iterable[ParameterUse], parameters: Iterable[str]) -> CutPoints:
        """The places of a graph's uses of parameters, in the order in which they come."""
        names: dict[fx.Node, list[str]] = {}
        table: dict[str, list[int]] = {name: [] for name in parameters}
        for use in found:
            names.setdefault(use.node, []).append(use.name)
            table[use.name].append(len(names) - 1)
        uses = ((name, tuple(at) or (0,)) for name, at in table.items())
        return CutPoints(tuple(map(tuple, names.values())), tuple(uses))

    def stages(self, cuts: Sequence[int]) -> Uses:
        """For each parameter the stage of each of its uses, where cuts are first places."""
        return tuple(
            (name, tuple(sum(cut <= place for cut in cuts) for place in at))
            for name, at in self.uses
        )


def segments_of(
    graph: TrainingGraph, places: CutPoints, taken: Sequence[float], copies: float
) -> list[Segment]:
    """What there is to balance.

    Args:
        graph: of one micro-batch, each place being a stage of its own.
        places: where it may be cut.
        taken: seconds from each place to the next.
        copies: bytes that are held for each byte of a parameter, gradient and states included.
    """
    kinds, at = dependences(graph), _stages(graph)
    returned = {n for r, n in zip(graph.outputs, graph.results, strict=True)
                if n is not None and isinstance(r, Gradient)}  # fmt: skip
    count = len(places.names)
    saved, held = [0] * count, [0.0] * count
    crossing = {phase: [0] * (count + 1) for phase in ("forward", "backward")}
    reach = _reach(graph, at, returned)
    for node, place in at.items():
        if kinds[node] != "staged" or _is_view(node, at):
            continue
        nbytes, phase = sum(map(tensor_bytes, tensors(node))), node.meta["phase"]
        first, last = sorted((place, reach[node]))
        if first < last:  # a difference at each end: summed up below
            crossing[phase][first + 1] += nbytes
            crossing[phase][last + 1] -= nbytes
        if phase == "forward" and any(n.meta.get("phase") == "backward" for n in node.users):
            saved[place] += nbytes
    uses = dict(places.uses)
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        if isinstance(role, Parameter):
            held[uses[role.name][0]] += copies * tensor_bytes(tensors(node)[0])
    sent, back = (_sums(crossing[phase]) for phase in ("forward", "backward"))
    return [Segment(taken[i], round(held[i]), saved[i], sent[i], back[i]) for i in range(count)]


def seconds_of(
    graph: TrainingGraph, places: CutPoints, cluster: Cluster, operators: OperatorTimes, once: str
) -> list[float]:
    """Seconds from each place to the next, forward and backward.

    Args:
        graph: lowered, each place being a stage of its own.
        places: where it may be cut.
        cluster: times of collectives.
        operators: times of operators.
        once: the axis whose collectives are left out: what it sums once a step.
    """
    found, operators = [0.0] * len(places.names), operators.of(graph)
    for node, place in _stages(graph).items():
        found[place] += operators.seconds(node).seconds
        if collective_of(node) is not None:
            sent = Transfer.of(node, graph.axes, cluster.ranks_per_node)
            if sent.axis != once:
                found[place] += cluster.price(sent).seconds
    return found


def _stages(graph: TrainingGraph) -> dict[fx.Node, int]:
    """The stage of every operator; what passes wrote without one is where it is read from."""
    found: dict[fx.Node, int] = {}
    for node in graph.calls():
        read = [found[n] for n in node.all_input_nodes if n in found]
        late = node.meta["phase"] == "backward"
        place = node.meta.get("stage")
        found[node] = (min if late else max)(read, default=0) if place is None else place
    return found


def _reach(
    graph: TrainingGraph, at: Mapping[fx.Node, int], returned: set[fx.Node]
) -> dict[fx.Node, int]:
    """The furthest stage that reads each value: the last of the forward's, the first otherwise.

    Later stages take views for themselves, and sums of gradients are made where they are returned.
    """
    found: dict[fx.Node, int] = {}
    for node in reversed(list(at)):
        users = [n for n in node.users if n in at and n not in returned]
        places = [found[n] if _is_view(n, at) else at[n] for n in users]
        backward = node.meta["phase"] == "backward"
        found[node] = (min if backward else max)([at[node], *places])
    return found


def _is_view(node: fx.Node, at: Mapping[fx.Node, int]) -> bool:
    """Whether a value is another's, laid out in another way."""
    source = node.args[0] if node.args else None
    return (
        op_packet(node) in LAYOUT_OPS
        and node.meta["phase"] == "forward"
        and isinstance(source, fx.Node)
        and source in at
        and sum(map(tensor_bytes, tensors(source))) == sum(map(tensor_bytes, tensors(node)))
    )


def _sums(differences: Sequence[int]) -> list[int]:
    """What crosses before each place."""
    total, found = 0, []
    for step in differences:
        total += step
        found.append(total)
    return found
