"""`measure`: times the collectives of the live process group and caches the result.

Rank 0 takes all decisions (whether a cached measurement serves, what to time next, when to stop)
and broadcasts them, so the ranks never diverge.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import date
from typing import Any

import torch
import torch.distributed as dist

from autopar.core.common.checks import MAX_BYTES, argument_error, choice, count, flag, seconds, text
from autopar.core.common.groups import backends_of
from autopar.core.common.notices import warn_once
from autopar.core.common.world import world
from autopar.core.gloo_chunks import MAX_CHUNKS
from autopar.core.ir.messages import COLLECTIVES
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import NO_SLOWDOWN
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.host import Host, device_name, node_id
from autopar.cost_model.measurement.bench import Bench
from autopar.cost_model.measurement.cluster_cache import deviation, read_cluster, write_cluster
from autopar.cost_model.measurement.group_layouts import (
    EVERY_AXIS_RANKS,
    affordable,
    axes_of,
    block_of,
    layouts,
    levels_of,
    measured_axes,
)
from autopar.cost_model.measurement.interference_bench import measure_slowdown, shared_gpu
from autopar.cost_model.measurement.sampling import Layouts, ReportProgress, sample_in_turn
from autopar.cost_model.topology.topology import topology_from_pairs
from autopar.errors import DisagreementError, MeasurementWarning

KIB, MIB = 2**10, 2**20
SIZES = (*(KIB * 4**power for power in range(8)), 32 * MIB)
"""1 KiB to 16 MiB in powers of 4, and 32 MiB."""

DTYPES = ("float32", "float64", "float16", "bfloat16")

_PREFIXES = ("NCCL_", "TORCH_NCCL_", "RCCL_", "GLOO_", "UCX_")


@dataclass(frozen=True)
class Request:
    """Arguments of `measure`, the same on every rank."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    mesh: tuple[tuple[str, int], ...] | None
    dtype: str
    budget_s: float
    cache: bool
    fresh: bool

    def check(self, world_size: int) -> None:
        """Raises unless this can be measured among `world_size` ranks."""
        ranks = [size for _, size in self.mesh or ()]
        if self.mesh is not None and torch.Size(ranks).numel() != world_size:
            raise ClusterError(f"mesh={dict(self.mesh)} is not of {world_size} ranks")

    def layouts(self, world_size: int, ranks_per_node: int) -> Layouts:
        """The groups of each curve to measure. Sends have two ranks."""
        every = self.mesh is None
        if self.mesh is None:
            axes = measured_axes(world_size, ranks_per_node)
        else:
            axes = axes_of(dict(self.mesh))
        axes = [*axes, *levels_of(axes, ranks_per_node)]
        shapes = affordable(layouts(axes, world_size, ranks_per_node, alone=every))
        return {
            CurveKey(collective, shape, self.dtype): groups
            for shape, groups in shapes.items()
            for collective in self.collectives
            if shape.ranks == 2 or (collective != "send" and world_size % shape.ranks == 0)
        }


def measure(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | None = None,
    collectives: Sequence[str] = COLLECTIVES,
    sizes: Sequence[int] = SIZES,
    mesh: Mapping[str, int] | None = None,
    dtype: str = "float32",
    budget_s: float = 40.0,
    cache: bool = True,
    fresh: bool = False,
    progress: ReportProgress | None = None,
) -> Cluster:
    """The cluster of this process group. Every rank of the group calls it.

    Each collective is timed over groups of every shape (see `group_layouts`) at each size, in
    trials that alternate over the whole time (see `sampling`). Their medians are cached. A cached
    measurement is checked when it is read (see `cluster_cache`), and replaced with a warning if it
    no longer holds.

    Args:
        group: the process group; None for the default one. Without any, the cluster has one rank.
        device: device of the messages; None for the current GPU if NCCL carries its tensors.
        collectives: collectives to time.
        sizes: message sizes in bytes.
        mesh: size of each axis, outermost first: times the groups along these axes at once, and
            those inside and across nodes of an axis over several nodes. None: the axes of every
            mesh, and their groups alone as well.
        dtype: dtype of the messages, such as "float32".
        budget_s: approximate seconds to spend. Slow sizes are left out rather than overspend.
        cache: whether to read and write the cache.
        fresh: whether to measure even if a cached measurement would serve.
        progress: is called with the finished share, 0 to 1, on rank 0.

    Raises:
        ClusterError: an argument is invalid.
        DisagreementError: the arguments differ between ranks.
        CommunicationError: another rank died, or exceeded the group's timeout.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise argument_error(
            "group", group, "give a process group of torch.distributed", ClusterError
        )
    _check_list("collectives", collectives)
    for collective in collectives:
        choice("collectives", collective, COLLECTIVES, error=ClusterError)
    _check_list("sizes", sizes)
    for size in sizes:
        count("sizes", size, 1, MAX_BYTES, ClusterError)
    if mesh is not None and not (isinstance(mesh, Mapping) and mesh):
        raise argument_error("mesh", mesh, "give sizes of axes by name, as {'dp': 2}", ClusterError)
    for axis, ranks in (mesh or {}).items():
        text("mesh", axis, "give names of axes", ClusterError)
        count("mesh", ranks, error=ClusterError)
    choice("dtype", dtype, DTYPES, error=ClusterError)
    seconds("budget_s", budget_s, error=ClusterError)
    flag("cache", cache, ClusterError)
    flag("fresh", fresh, ClusterError)
    if progress is not None and not callable(progress):
        raise argument_error("tell", progress, "give a function", ClusterError)
    axes, ordered = tuple((mesh or {}).items()) or None, tuple(sorted(set(sizes)))
    request = Request(tuple(collectives), ordered, axes, dtype, budget_s, cache, fresh)
    live = dist.is_available() and dist.is_initialized()
    group = (group or world()) if live else None
    device = device or _device_of(group)
    if group is not None and backends_of(group).get(device.type) == "gloo":
        device = torch.device("cpu")  # gloo copies tensors of GPUs to the host
    if group is None or dist.get_world_size(group) == 1:
        request.check(1)
        return _alone(device)
    if dist.get_backend(group) == "fake":
        name = device_name(device) if device.type == "cuda" else "cpu"
        return Cluster.default(dist.get_world_size(group), name)
    with Bench(group, device) as bench:
        requests = bench.gather(request)
        for rank, other in enumerate(requests):
            for field in fields(Request):
                mine, theirs = getattr(requests[0], field.name), getattr(other, field.name)
                if mine != theirs:
                    raise DisagreementError(
                        f"measure: {field.name} is {mine!r} on rank 0 but {theirs!r} on rank {rank}"
                    )
        request.check(bench.world_size)
        return _cached_or_new(bench, request, progress or (lambda done: None))


def _check_list(name: str, value: Any) -> None:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence) or not value:
        raise argument_error(name, value, "give a list or tuple, not an empty one", ClusterError)


def _environment() -> dict[str, str]:
    """Variables that decide how fast collectives are."""
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_PREFIXES)}


def _cached_or_new(bench: Bench, request: Request, progress: ReportProgress) -> Cluster:
    hosts = bench.gather((asdict(Host.here()), device_name(bench.device)))
    nodes = bench.gather(node_id())
    places = [nodes.index(node) for node in nodes]  # reboots change identities
    facts = {"hosts": hosts, "nodes": places, "backend": bench.backend}
    facts |= {"dtype": request.dtype, "pieces": MAX_CHUNKS}
    if bench.backend == "nccl":
        facts["nccl"] = list(torch.cuda.nccl.version())
    environments = bench.gather(_environment())
    if any(environments):
        facts["environments"] = environments
    ranks_per_node = block_of(nodes)
    wanted = request.layouts(bench.world_size, ranks_per_node)
    reads = request.cache and not request.fresh
    cached, spent_s = bench.agree(lambda: read_cluster(facts) if reads else None) or (None, 0.0)
    # A shorter measurement does not serve: it left out sizes that were too slow for its budget.
    if cached and spent_s >= request.budget_s and all(key in cached.curves for key in wanted):
        wrong = deviation(bench, cached, wanted)
        if wrong is None:
            return cached
        if bench.rank == 0:
            warn_once(
                MeasurementWarning,
                f"autopar measures this cluster again, since {wrong}. "
                "Training stays the same; plans from now on are for these speeds.",
            )
    cluster = _measure(bench, request, wanted, hosts[0], ranks_per_node, progress)
    if bench.rank == 0 and request.cache:
        write_cluster(facts, cluster, request.budget_s)
    return cluster


def _measure(
    bench: Bench,
    request: Request,
    wanted: Layouts,
    first: tuple[dict[str, Any], str],
    ranks_per_node: int,
    tell: ReportProgress,
) -> Cluster:
    samples = sample_in_turn(bench, wanted, request.sizes, request.budget_s, tell)
    cpu, nodes = bench.device.type == "cpu", bench.world_size // ranks_per_node
    host, device = first
    today = f"measured {date.today()} on {host['name']}"
    slowdown = measure_slowdown(bench, today) if cpu else shared_gpu(bench)
    versions = {"torch": str(torch.__version__)}
    if bench.backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    version = ", ".join([bench.backend, *(f"{name} {v}" for name, v in versions.items())])

    def record() -> Cluster:
        curves = {
            key: Measured(Curve.fit(by_size), today, version) for key, by_size in samples.items()
        }
        return Cluster(
            name=f"{bench.world_size} x {device} ({bench.backend})",
            device="cpu" if cpu else device,
            world_size=bench.world_size,
            ranks_per_node=ranks_per_node,
            curves=curves,
            backend=bench.backend,
            versions=versions,
            provenance=today,
            slowdown=slowdown,
            uniform=cpu or bench.world_size > EVERY_AXIS_RANKS,
            topology=topology_from_pairs(curves, nodes, ranks_per_node) if cpu else None,
            device_memory_bytes=_device_memory(bench.device, host["memory_bytes"], ranks_per_node),
            host_memory_bytes=host["memory_bytes"] or None,
        )

    return bench.agree(record)


def _device_memory(device: torch.device, host_bytes: int, sharing: int) -> int | None:
    """Bytes that one rank may fill: those of the GPU, or its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_bytes // sharing or None


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """The current GPU, if there is one and NCCL carries its tensors; else the CPU."""
    if torch.cuda.is_available() and (group is None or backends_of(group).get("cuda") == "nccl"):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _alone(device: torch.device) -> Cluster:
    """The cluster of one process."""
    host, cuda = Host.here(), device.type == "cuda"
    return Cluster(
        name=f"one {device_name(device)}",
        device=device_name(device) if cuda else "cpu",
        world_size=1,
        ranks_per_node=1,
        curves={},
        backend="none",
        versions={"torch": str(torch.__version__)},
        provenance=f"measured {date.today()} on {host.name}",
        slowdown=NO_SLOWDOWN,
        device_memory_bytes=_device_memory(device, host.memory_bytes, 1),
        host_memory_bytes=host.memory_bytes or None,
    )
