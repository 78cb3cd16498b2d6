"""`PlanningProblem`, the input of the planner, and `SearchContext`, the limits of a search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.ir.placement import Replicate
from autopar.core.plan.decisions import fingerprint
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import REDUCE_PRECISIONS, Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.kernels.fusion import EAGER
from autopar.cost_model.measurement.device_memory import DeviceMemory
from autopar.cost_model.measurement.optimizer_step import Optimizer
from autopar.cost_model.memory.allocator import context_bytes
from autopar.cost_model.memory.optimizer_memory import optimizer_state_ratio
from autopar.errors import StrategyError
from autopar.planner.baseline import Baseline

Graphs = Mapping[int, TrainingGraph]
"""The captured graph of one micro-batch, by the number of micro-batches."""


@dataclass(frozen=True)
class PlanningProblem:
    """Everything a plan depends on except the graphs and the machine.

    Attributes:
        model: class name of the model.
        memory: cap per rank in bytes, None for the device's capacity.
        batch: "global" or "local".
        precision: name of the autocast dtype, or None.
        optimizer: optimizer class or factory.
        cluster: cluster to plan for, None for the running one.
        comm_backend: backend of the collectives, such as "nccl".
        backend: torch.compile backend of the programs.
        device_memory: memory of the running GPUs, None if they are not running.
        state_block_bytes: bytes of parameters that are stepped at once, as if the optimizer's
            states were on storage; 0 to plan for the optimizer as it is.
        speeds: speed of each rank relative to the fastest; () if they are equal or unknown.
        row_length: most elements of a row of the inputs along one dim; 0 if unknown.
        rows: rows of all inputs of a step; 0 if unknown.
    """

    model: str
    parameters: Mapping[str, ParameterInfo]
    world_size: int
    strategy: Strategy
    memory: int | None
    batch: str
    precision: str | None
    optimizer: Optimizer
    cluster: Cluster | None
    device: torch.device
    comm_backend: str
    backend: str = EAGER
    device_memory: DeviceMemory | None = None
    state_block_bytes: int = 0
    speeds: tuple[float, ...] = ()
    row_length: int = 0
    rows: int = 0

    def __post_init__(self) -> None:
        self.strategy.mesh(self.world_size)
        self._check_offload()
        zero = self.strategy.zero
        unknown = sorted(set(zero) - set(self.blocks)) if isinstance(zero, Mapping) else []
        if unknown:
            raise StrategyError(
                f"zero names blocks that {self.model} does not have: {unknown}. It has "
                f"{list(self.blocks)}, where '' is all outside of blocks."
            )

    def _check_offload(self) -> None:
        """Raises StrategyError if there is no such lower level of memory."""
        strategy = self.strategy
        if strategy.offloads and strategy.offload_dir is None and not self.on_gpus:
            raise StrategyError(
                f"offload={strategy.offload!r} needs a folder, because CPUs have no memory below "
                "their own but storage: give Strategy(offload_dir=...) too"
            )
        fixed = strategy.stores_parameters and strategy.offload != "auto"
        if fixed and strategy.offload_dir is not None and self.on_gpus:
            raise StrategyError(
                f"offload={strategy.offload!r} with offload_dir={strategy.offload_dir!r}: "
                "parameters of GPUs go to host memory only. Leave offload_dir out"
            )

    @property
    def on_gpus(self) -> bool:
        """Whether the ranks are GPUs."""
        return self.device.type == "cuda" if self.cluster is None else self.cluster.on_gpus

    @property
    def stage_paces(self) -> tuple[float, ...]:
        """Seconds that each pipeline rank takes for a second of the mean rank; () if equal.

        The slowest of the ranks that share a stage counts.
        """
        ranks, seconds = self.strategy.pp or 1, [1.0 / speed for speed in self.speeds]
        if ranks == 1 or not seconds:
            return ()
        mean, each = sum(seconds) / len(seconds), len(seconds) // ranks  # pp is outermost
        slowest = (max(seconds[rank * each : (rank + 1) * each]) for rank in range(ranks))
        return tuple(pace / mean for pace in slowest)

    @property
    def blocks(self) -> tuple[str, ...]:
        """Names of the blocks that have parameters, "" first."""
        return ("", *dict.fromkeys(p.block for p in self.parameters.values() if p.block))

    @cached_property
    def dtypes(self) -> Counter[torch.dtype]:
        """Bytes of the parameters of each dtype."""
        sizes = Counter[torch.dtype]()
        for parameter in self.parameters.values():
            sizes[parameter.dtype] += parameter.bytes
        return sizes

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the largest number of parameter bytes."""
        return next((dtype for dtype, _ in self.dtypes.most_common(1)), torch.float32)

    @cached_property
    def state_ratio(self) -> float:
        """Bytes of optimizer state in memory per byte of parameter."""
        if self.state_block_bytes:
            return 0.0
        return optimizer_state_ratio(self.optimizer, self.dtype, self.device.type)

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return dict(self.mesh)[DATA_AXIS]

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same dense parameters, unless ZeRO shards them."""
        return self.dp_size * (self.strategy.cp or 1) * (self.strategy.ep or 1)

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that ZeRO shards every parameter over; over ep only dense ones."""
        return (self.strategy.dp_shard or self.dp_size) * (self.strategy.cp or 1)

    @property
    def mesh(self) -> tuple[tuple[str, int], ...]:
        return self.strategy.mesh(self.world_size)

    @property
    def optimizer_name(self) -> str:
        return getattr(self.optimizer, "__name__", type(self.optimizer).__name__)

    @property
    def reduce_precision(self) -> str | None:
        """Name of the dtype that gradients are reduced in; None for their own."""
        return REDUCE_PRECISIONS.get(self.strategy.reduce_precision or "")

    @property
    def is_hybrid(self) -> bool:
        """Whether ZeRO shards over some of the data-parallel ranks, and replicates the shards."""
        return 1 < (self.strategy.dp_shard or 1) < self.dp_size

    def base(self) -> Plan:
        """A plan without any choice of the planner."""
        return Plan(
            name="",
            model=self.model,
            fingerprint=fingerprint(self.parameters.values()),
            world_size=self.world_size,
            mesh=self.mesh,
            zero_stages=tuple((block, 0) for block in self.blocks),
            batch=self.batch,
            offload_dir=self.strategy.offload_dir or "",
            activation_bytes=self.strategy.activation_bytes,
            batch_semantics=self.strategy.batch_semantics,
            precision=self.precision,
            reduce_precision=self.reduce_precision,
            optimizer=self.optimizer_name,
            optimizer_state_ratio=self.state_ratio,
            memory_cap=self.memory,
            comm_backend=self.comm_backend,
            hybrid=self.is_hybrid,
            parameter_bytes=tuple((p.name, p.bytes) for p in self.parameters.values()),
            parameter_dtypes=tuple((str(d)[6:], size) for d, size in self.dtypes.most_common()),
            placements=tuple((name, Replicate()) for name in self.parameters),
        )

    def cap_on(self, cluster: Cluster | None) -> int | None:
        """Memory cap per rank in bytes: the user's, or the capacity of the cluster's device.

        Of running GPUs it is what is free, less the communicators of the mesh and a margin.
        """
        if self.memory is None and self.device_memory is not None:
            return self.device_memory.cap(self._communicators(cluster))
        if self.memory is not None or cluster is None or cluster.device_memory_bytes is None:
            return self.memory
        return cluster.device_memory_bytes - context_bytes(cluster.device)

    def memory_notes(self, cluster: Cluster) -> tuple[str, ...]:
        """A note on the cap, where it was measured on the running GPUs."""
        if self.memory is not None or self.device_memory is None:
            return ()
        return (self.device_memory.describe(self._communicators(cluster)),)

    def _communicators(self, cluster: Cluster | None) -> int:
        """Communicators that a plan makes beside the world's.

        One an axis, two for its levels, and two for the neighbours of a pipeline's rank.
        """
        axes = [name for name, size in self.mesh if size > 1]
        nodes = cluster is not None and cluster.world_size > cluster.ranks_per_node
        by_level = self.strategy.dp_shard or (nodes and self.strategy.hierarchical is not False)
        pairs = 2 if "pp" in axes else 0
        return (len(axes) if len(axes) > 1 else 0) + (2 if by_level else 0) + pairs


@dataclass(frozen=True)
class SearchContext:
    """Limits and observer of a search.

    Attributes:
        deadline: returns whether time is left to improve on a plan that fits.
        incumbent_s: best step time found so far on other meshes, in seconds.
        on_candidate: called with every candidate plan; None if nobody observes the search.
        baseline: best data parallelism of torch among the candidates, as a record.
        estimating: returns whether time is left to estimate further meshes.
        proving: returns whether time is left to plan meshes only for a tighter bound.
        floor_s: returns a lower bound of the step of every mesh, in seconds.
        timed: whether a first answer is wanted soon, because time is limited.
    """

    deadline: Callable[[], bool] = lambda: True
    incumbent_s: float = math.inf
    on_candidate: Callable[[Plan], None] | None = None
    baseline: Baseline | None = None
    estimating: Callable[[], bool] = lambda: True
    proving: Callable[[], bool] = lambda: False
    timed: bool = False
    floor_s: Callable[[], float] = lambda: 0.0

    def note(self, plan: Plan) -> None:
        """Tells the observers of a candidate plan."""
        if self.baseline is not None:
            self.baseline.note(plan)
        if self.on_candidate is not None:
            self.on_candidate(plan)
