"""What the machine at hand is measured to do, for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autopar.cost_model.cluster import Cluster
from autopar.cost_model.measure import measure
from autopar.cost_model.operators import OperatorTimes
from autopar.cost_model.update import Optimizer, UpdateCost, measure_update
from autopar.graph import TrainingGraph


@dataclass(frozen=True)
class Machine:
    """Times of collectives and operators.

    Attributes:
        cluster: times of collectives.
        operators: times of operators.
        update: time of the optimizer's step.
    """

    cluster: Cluster
    operators: OperatorTimes
    update: UpdateCost


def measure_machine(
    graphs: Sequence[TrainingGraph],
    device: torch.device,
    cluster: Cluster | None,
    optimizer: Optimizer,
    *,
    live: bool,
) -> Machine:
    """Measures, or reads what was measured before. Every rank of a live world calls it at once.

    Args:
        graphs: lowered graphs, whose operators are timed.
        device: on which.
        cluster: the cluster to plan for; None for the one that is running.
        optimizer: class or factory of the optimizer.
        live: whether the ranks of the plan are running here.
    """
    if cluster is None:
        cluster = measure()
    sharing = cluster.ranks_per_node if device.type == "cpu" and live else 1
    name = device if live or cluster.device == "cpu" else cluster.device
    operators = OperatorTimes.load(name, sharing=sharing).measure(graphs)
    operators.save()
    mesh = None
    if live and dist.is_initialized() and dist.get_world_size() > 1:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return Machine(cluster, operators, measure_update(optimizer, device, mesh))
