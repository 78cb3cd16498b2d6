"""What the machine at hand is measured to do, for the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import distributed as dist
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import COLLECTIVES
from autopar.cost_model.kernels.fusion import EAGER
from autopar.cost_model.measurement.measure import measure
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.optimizer_step import Optimizer, UpdateCost, measure_update
from autopar.cost_model.measurement.step_replay import SINGLE_RANK, ReplayGroup
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory, optimizer_state_ratio
from autopar.cost_model.memory.workspace import Workspace
from autopar.ir.graph import TrainingGraph

_QUICK_S = 4.0  # for collectives, when compiling; `autopar measure` takes its time
_GLOO_THREADS = 2  # that torch gives a group of ranks to carry its messages
_COLLECTIVES = tuple(name for name in COLLECTIVES if name != "send")  # of compiled steps


@dataclass(frozen=True)
class Machine:
    """Times of collectives and operators, and bytes that no graph shows.

    Attributes:
        cluster: times of collectives.
        operators: times of operators.
        update: time of the optimizer's step.
        overhead: bytes that are allocated beside the tensors of a graph.
    """

    cluster: Cluster
    operators: OperatorTimes
    update: UpdateCost
    overhead: Overhead


def measure_machine(
    graphs: Sequence[TrainingGraph],
    device: torch.device,
    cluster: Cluster | None,
    optimizer: Optimizer,
    *,
    live: bool,
    backend: str = EAGER,
    dtype: torch.dtype = torch.float32,
) -> Machine:
    """Measures, or reads what was measured before. Every rank of a live world calls it at once.

    Args:
        graphs: lowered graphs, whose operators are timed.
        device: on which.
        cluster: the cluster to plan for; None for the one that is running.
        optimizer: class or factory of the optimizer.
        live: whether the ranks of the plan are running here.
        backend: of torch.compile, by which the graphs are compiled.
        dtype: of the parameters.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if cluster is None:
        cluster = measure(collectives=_COLLECTIVES, mesh={"dp": world_size}, budget_s=_QUICK_S)
    several = live and world_size > 1
    ranks = ranks_of(live=live)
    sharing = ranks.sharing if device.type == "cpu" else 1
    name = device if live else _device_of(device, cluster)
    operators = OperatorTimes.load(name, sharing=sharing).measure(graphs, ranks)
    operators.save()
    operators = replace(operators, backend=backend)
    mesh = init_device_mesh(device.type, (world_size,)) if several else None
    if operators.present:
        update = measure_update(optimizer, device, mesh)
    else:
        update = _modelled_update(operators, optimizer, dtype)
    overhead = measure_overhead(graphs, cluster, optimizer, dtype)
    return Machine(
        cluster, operators, update, replace(overhead, retained_collectives=_lingering(operators))
    )


def known_machine(
    device: torch.device,
    cluster: Cluster,
    optimizer: Optimizer,
    *,
    sharing: int,
    backend: str = EAGER,
    dtype: torch.dtype = torch.float32,
) -> Machine:
    """What is known of a machine without measuring anything; the rest of it is modelled.

    Args:
        device: on which.
        cluster: the cluster to plan for.
        optimizer: class or factory of the optimizer.
        sharing: ranks that share a host's cores.
        backend: of torch.compile, by which graphs would be compiled.
        dtype: of the parameters.
    """
    operators = OperatorTimes.load(_device_of(device, cluster), sharing=sharing)
    operators = replace(operators, backend=backend)
    update = _modelled_update(operators, optimizer, dtype)
    overhead = Overhead(device=cluster.device, retained_collectives=_lingering(operators))
    return Machine(cluster, operators, update, overhead)


def absent(device: torch.device, cluster: Cluster | None) -> bool:
    """Whether operators of a cluster's device cannot be timed here, so that all are modelled."""
    return not OperatorTimes.load(_device_of(device, cluster)).present


def _lingering(operators: OperatorTimes) -> int:
    """How many collectives gloo's threads may hold on to: where ranks outnumber cores, any."""
    crowded = operators.oversubscription > operators.setting.threads
    return _GLOO_THREADS if crowded else 0


def _device_of(device: torch.device, cluster: Cluster | None) -> torch.device | str:
    """What operators of a cluster that need not be running are priced for."""
    return device if cluster is None or cluster.device == "cpu" else cluster.device


def _modelled_update(
    operators: OperatorTimes, optimizer: Optimizer, dtype: torch.dtype
) -> UpdateCost:
    """The optimizer's step on a device that is not here."""
    return UpdateCost.modelled(operators.roofline, optimizer_state_ratio(optimizer, dtype))


def time_shards(machine: Machine, nodes: Mapping[str, fx.Node], *, live: bool) -> Machine:
    """The machine with operators timed alone; every rank of a live world calls it at once.

    Args:
        machine: as measured.
        nodes: the operators by signature, some of them parts of others.
        live: whether the ranks of the plan are running here.
    """
    operators = machine.operators.measure_alone(nodes, ranks_of(live=live))
    operators.save()
    return replace(machine, operators=operators)


def ranks_of(*, live: bool) -> ReplayGroup:
    """Those who measure together: all that are running, or this process."""
    several = live and dist.is_initialized() and dist.get_world_size() > 1
    return ReplayGroup.live() if several else SINGLE_RANK


def measure_overhead(
    graphs: Sequence[TrainingGraph],
    cluster: Cluster,
    optimizer: Optimizer,
    dtype: torch.dtype = torch.float32,
) -> Overhead:
    """What kernels and the optimizer allocate, as far as the cluster's device is in this machine.

    Args:
        graphs: lowered graphs, whose operators are run.
        cluster: names the device.
        optimizer: class or factory of the optimizer.
        dtype: of the parameters.
    """
    scratch = Workspace.load(cluster.device).measure(graphs)
    scratch.save()
    kind = "cpu" if cluster.device == "cpu" else "cuda"
    return Overhead(OptimizerMemory.measure(optimizer, kind, dtype), scratch, cluster.device)
