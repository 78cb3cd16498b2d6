"""`Machine`: measured or modelled times of collectives, operators and the optimizer's step."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autopar.core.common.world import world, world_size
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.messages import COLLECTIVES, FROM_HOST, READ, TO_HOST, WRITE
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.kernels.fusion import EAGER
from autopar.cost_model.kernels.slowest import slowest_of
from autopar.cost_model.measurement.host_copy_bench import measure_host
from autopar.cost_model.measurement.measure import measure
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.optimizer_step import Optimizer, UpdateCost, measure_update
from autopar.cost_model.measurement.step_replay import SINGLE_RANK, ReplayGroup
from autopar.cost_model.measurement.storage_bench import measure_storage
from autopar.cost_model.memory.liveness import Overhead
from autopar.cost_model.memory.optimizer_memory import OptimizerMemory, optimizer_state_ratio
from autopar.cost_model.memory.workspace import Workspace
from autopar.planner.problem import PlanningProblem

_QUICK_S = 4.0  # budget for collectives when compiling; `autopar measure` takes longer
_GLOO_THREADS = 2  # threads of a gloo group in torch
_COLLECTIVES = tuple(name for name in COLLECTIVES if name != "send")


@dataclass(frozen=True)
class Machine:
    """Times of collectives and operators, and memory that no graph shows."""

    cluster: Cluster
    operators: OperatorTimes
    update: UpdateCost
    overhead: Overhead

    def with_stored_states(self, block_bytes: int, folder: str = "") -> Machine:
        """As for an `OffloadedOptimizer` of this optimizer that steps blocks of some bytes.

        States lie in files of the folder; for "" in host memory, or in files of CPUs. Transfers
        are added to the step as if nothing hid them.
        """
        memory, cluster = self.overhead.optimizer, self.cluster
        ratio, curve = sum(memory.state), self.update.curve
        in_host_memory = cluster.on_gpus and not folder
        kinds = (FROM_HOST, TO_HOST) if in_host_memory else (READ, WRITE)
        moved = [
            sum(cluster.transfers(k).seconds(k, round(ratio * size)).seconds for k in kinds)
            for size in curve.bytes
        ]
        seconds = tuple(map(operator.add, curve.seconds, moved))
        stored = replace(memory, state=(), stored=ratio, block_bytes=block_bytes)
        update = replace(self.update, curve=replace(curve, seconds=seconds))
        return replace(self, update=update, overhead=replace(self.overhead, optimizer=stored))


def measure_machine(
    graphs: Sequence[TrainingGraph],
    device: torch.device,
    cluster: Cluster | None,
    optimizer: Optimizer,
    *,
    live: bool,
    backend: str = EAGER,
    dtype: torch.dtype = torch.float32,
    limit_s: float = math.inf,
    offload_dir: str = "",
    offload: bool = False,
) -> Machine:
    """Measures a machine, the running one for `cluster=None`, or loads earlier measurements.

    All live ranks call this at once. Operators that take longer than `limit_s` are modelled. The
    storage of `offload_dir` is measured if it is given. Copies between live GPUs and host memory
    are measured for `offload`.
    """
    if cluster is None:
        mesh_sizes = {"dp": world_size()}
        cluster = measure(
            device=device, collectives=_COLLECTIVES, mesh=mesh_sizes, budget_s=_QUICK_S
        )
    if offload_dir and cluster.storage is None and Path(offload_dir).is_dir():
        cluster = replace(cluster, storage=measure_storage(offload_dir))
    if offload and live and device.type == "cuda" and cluster.host is None:
        cluster = replace(cluster, host=measure_host(device))
    ranks = ranks_of(live=live)
    sharing = ranks.sharing if device.type == "cpu" else 1
    name = device if live else _priced_device(device, cluster)
    operators = OperatorTimes.load(name, sharing=sharing, runs_on=device.type)
    workspace = Workspace.load(cluster.device, runs_on=device.type)
    operators, workspace = _timed(operators, workspace, graphs, ranks, limit_s)
    operators = _modelled(replace(operators, backend=backend), cluster)
    several = live and world_size() > 1
    mesh = DeviceMesh.from_group(world(), device.type) if several else None
    if operators.present:
        update = measure_update(optimizer, device, mesh, operators.shares_cores)
    else:
        ratio = optimizer_state_ratio(optimizer, dtype, device.type)
        update = UpdateCost.modelled(operators.roofline, ratio)
    kind = "cpu" if cluster.device == "cpu" else "cuda"
    states = OptimizerMemory.measure(optimizer, kind, dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # communicators need memory that torch does not hold
    retained = _retained_collectives(operators)
    overhead = Overhead(states, workspace, cluster.device, retained_collectives=retained)
    return Machine(cluster, operators, update, overhead)


def known_machine(problem: PlanningProblem, sharing: int) -> Machine:
    """A machine from earlier measurements and models; measures nothing."""
    cluster = problem.cluster
    assert cluster is not None
    name, kind = _priced_device(problem.device, cluster), problem.device.type
    operators = OperatorTimes.load(name, sharing=sharing, runs_on=kind)
    operators = _modelled(replace(operators, backend=problem.backend), cluster)
    update = UpdateCost.modelled(operators.roofline, problem.state_ratio)
    retained = _retained_collectives(operators)
    overhead = Overhead(device=cluster.device, retained_collectives=retained)
    return Machine(cluster, operators, update, overhead)


def absent(device: torch.device, cluster: Cluster | None) -> bool:
    """Whether the model is not on the cluster's device, so that operators must be modelled."""
    return not OperatorTimes.load(_priced_device(device, cluster), runs_on=device.type).present


def time_programs(
    machine: Machine,
    graphs: Sequence[TrainingGraph],
    *,
    live: bool,
    limit_s: float = math.inf,
) -> Machine:
    """The machine with operators of further graphs timed. All live ranks call this at once."""
    known = machine.operators, machine.overhead.workspace
    operators, workspace = _timed(*known, graphs, ranks_of(live=live), limit_s)
    overhead = replace(machine.overhead, workspace=workspace)
    return replace(machine, operators=operators, overhead=overhead)


def time_shards(
    machine: Machine, nodes: Mapping[str, fx.Node], *, live: bool, limit_s: float = math.inf
) -> Machine:
    """The machine with operators timed one by one. All live ranks call this at once."""
    operators = machine.operators.measure_alone(nodes, ranks_of(live=live), limit_s=limit_s)
    operators.save()
    return replace(machine, operators=operators)


def _timed(
    operators: OperatorTimes,
    workspace: Workspace,
    graphs: Sequence[TrainingGraph],
    ranks: ReplayGroup,
    limit_s: float,
) -> tuple[OperatorTimes, Workspace]:
    """Times and workspaces with operators of some graphs measured, and saved."""
    operators = operators.measure(graphs, ranks, limit_s=limit_s)
    operators.save()
    workspace = workspace.measure(graphs, limit_s)
    workspace.save()
    return operators, workspace


def _modelled(operators: OperatorTimes, cluster: Cluster) -> OperatorTimes:
    """These times, with what times of an absent GPU are modelled from."""
    if operators.present:
        return operators
    return replace(operators, versions=cluster.versions, pace=slowest_of(cluster.world_size))


def ranks_of(*, live: bool) -> ReplayGroup:
    """The ranks that measure together: all running ranks, or this process alone."""
    several = live and world_size() > 1
    return ReplayGroup.live() if several else SINGLE_RANK


def _retained_collectives(operators: OperatorTimes) -> int:
    """Number of collectives that gloo's threads may retain where ranks outnumber cores."""
    # A thread of gloo frees a collective only when it next gets a core.
    oversubscribed = operators.oversubscription > operators.setting.threads
    return _GLOO_THREADS if oversubscribed else 0


def _priced_device(device: torch.device, cluster: Cluster | None) -> torch.device | str:
    """Device that operators are priced for, if the cluster need not be running."""
    return device if cluster is None or cluster.device == "cpu" else cluster.device
