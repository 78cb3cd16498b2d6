"""`report_data_of_pipeline`: data of the HTML report from a simulated pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import Transfer
from autopar.cost_model.simulator.streams import Event
from autopar.ir.graph import TrainingGraph
from autopar.plan.prediction import ReportData
from autopar.planner.evaluate.report_data import sample_memory, traffic, transfers
from autopar.planner.evaluate.stage_memory import RankMemory


def report_data_of_pipeline(
    cluster: Cluster,
    memory: RankMemory,
    actions: Sequence[Event],
    lowered: Iterable[tuple[TrainingGraph, int]],
    messages: Counter[Transfer],
) -> ReportData:
    """Report data of a pipeline.

    Args:
        cluster: cluster of the simulation.
        memory: memory of the rank with the highest peak.
        actions: timeline of the same rank.
        lowered: graphs of the rank with the most compute, and the count of each.
        messages: messages of the latter rank to its neighbours.
    """
    sent = Counter(messages)
    for graph, times in lowered:
        for item in transfers(graph, cluster):
            sent[item] += times
    memory_s, rows = sample_memory(np.array(_times(memory, actions)), memory.table)
    return ReportData(cluster.ranks_per_node, (), memory_s, rows, traffic(sent, cluster))


def _times(memory: RankMemory, actions: Sequence[Event]) -> list[float]:
    """Time of each point of a memory curve, in seconds."""
    *inside, _ = memory.points
    spans = ((actions[index], part) for index, part in inside)
    return [*(e.start_s + part * e.seconds for e, part in spans), actions[-1].end_s]
