"""`least_seconds`: lower bound of a lowered step, over all schedules of its collectives."""

from __future__ import annotations

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import collective_of, is_wait
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.measurement.operator_times import OperatorTimes


def least_seconds(graph: TrainingGraph, cluster: Cluster, operators: OperatorTimes) -> float:
    """Lower bound in seconds of `simulate` for every schedule of a graph's collectives.

    Operators run in their order, which no schedule changes. An operator starts once the collectives
    that it depends on have ended. A collective starts once its inputs exist, beside any number of
    others, and slows nothing down. Collectives that no operator needs are hidden.
    """
    times, now = operators.of(graph), 0.0
    issue_s = cluster.slowdown.issue_s
    ready_s: dict[fx.Node, float] = {}
    for node in graph.calls():
        inputs_s = max((ready_s.get(each, 0.0) for each in node.all_input_nodes), default=0.0)
        if collective_of(node) is not None:
            transfer = Transfer.of(node, graph.axes, cluster.ranks_per_node)
            inputs_s += max(0.0, cluster.price(transfer).seconds - issue_s)
        elif not is_wait(node) and (seconds := times.seconds(node).seconds):
            inputs_s = now = max(now, inputs_s) + seconds
        ready_s[node] = inputs_s
    return now
