"""`measure`: time the collectives of the live process group and keep the result on disk.

Rank 0 decides everything (whether a kept measurement serves, what to time next, when to stop) and
tells the others, so the ranks never part ways.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.cost_model.bench import Bench
from autopar.cost_model.cluster import SCHEMA_VERSION, Cluster
from autopar.cost_model.collectives import COLLECTIVES, check_collective
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves import Curve
from autopar.cost_model.host import Host, device_name
from autopar.cost_model.measured import CurveKey, Measured
from autopar.cost_model.overlap import measure_overlap
from autopar.cost_model.shape import GroupShape
from autopar.cost_model.store import cache_directory, digest, read_json, write_json

KIB, MIB = 2**10, 2**20
SIZES = (*(KIB * 4**power for power in range(8)), 32 * MIB)
"""1 KiB to 16 MiB in powers of 4, and 32 MiB."""
TIMED = tuple(name for name in COLLECTIVES if name != "send")
"""What is timed unless asked otherwise."""

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25
_REPEAT_S = 2e-3  # short collectives are timed several in a row, until this many seconds


@dataclass(frozen=True)
class Case:
    """One thing to time: a collective among groups of `ranks`, of about `nbytes` bytes."""

    collective: str
    ranks: int
    nbytes: int


@dataclass(frozen=True)
class Timing:
    """The seconds that a case took on this rank, once."""

    case: Case
    seconds: float


def measure(
    group: dist.ProcessGroup | None = None,
    *,
    collectives: Sequence[str] = TIMED,
    sizes: Sequence[int] = SIZES,
    budget_s: float = 4.0,
    cache: bool = True,
) -> Cluster:
    """The cluster that this process group runs on. Every rank of the group calls it.

    Groups of every number of ranks that divides the world are timed, those of one size side by
    side. Each case is repeated in rounds, all cases in turn, and the medians are kept.

    Args:
        group: the process group, the default one if None. Without any, the answer is a cluster of
            one rank.
        collectives: which to time.
        sizes: message sizes in bytes.
        budget_s: about how many seconds to spend. Slow sizes are left out rather than overspend.
        cache: whether a kept measurement of the same machines may serve.
    """
    for collective in collectives:
        check_collective(collective)
    if not sizes or any(size <= 0 for size in sizes):
        raise ClusterError(f"sizes must be positive numbers of bytes, not {sizes!r}")
    if not (dist.is_available() and dist.is_initialized()):
        return _alone()
    group = group or dist.group.WORLD
    if group is None or dist.get_world_size(group) == 1:
        return _alone()
    if dist.get_backend(group) == "fake":
        return Cluster.default(dist.get_world_size(group))
    with Bench(group) as bench:
        facts = _fingerprint(bench, collectives, sizes)
        path = cache_directory() / "clusters" / f"{digest(facts)}.json"
        cluster = bench.agree(lambda: _kept(path, facts) if cache else None)
        if cluster is None:
            cluster = _measure(bench, facts, collectives, sorted(set(sizes)), budget_s)
            if bench.rank == 0 and cache:
                write_json(path, {"fingerprint": facts, "cluster": cluster.to_dict()})
        return cluster


def _fingerprint(bench: Bench, collectives: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """What a measurement depends on, the same on every rank."""
    hosts = bench.gather((Host.here().facts(), device_name(bench.device)))
    names = [host["name"] for host, _ in hosts]
    return {
        "schema": SCHEMA_VERSION,
        "hosts": hosts,
        "ranks_per_node": max(names.count(name) for name in names),
        "backend": bench.backend,
        "collectives": list(collectives),
        "sizes": list(sizes),
    }


def _kept(path: Path, facts: dict[str, Any]) -> Cluster | None:
    """The cluster kept in `path`, if it is of these facts and can be read."""
    data = read_json(path)
    if not isinstance(data, dict) or digest(data.get("fingerprint", {})) != digest(facts):
        return None
    try:
        return Cluster.from_dict(data["cluster"])
    except (ClusterError, KeyError):
        return None


def _measure(
    bench: Bench,
    facts: dict[str, Any],
    collectives: Sequence[str],
    sizes: Sequence[int],
    budget_s: float,
) -> Cluster:
    shapes = [n for n in range(2, bench.world_size + 1) if bench.world_size % n == 0]
    deadline = time.perf_counter() + budget_s
    timings = _first_round(bench, collectives, sizes, shapes, budget_s)
    timings += _more_rounds(bench, timings, deadline)
    samples = _means_over_ranks(bench, timings)
    cpu = bench.device.type == "cpu"
    overlap = measure_overlap(bench) if cpu else 1.0
    host, device = facts["hosts"][0]
    today = f"measured {date.today()} on {host['name']}"
    versions = _versions(bench.backend)
    version = ", ".join([bench.backend, *(f"{name} {v}" for name, v in versions.items())])
    curves = {
        CurveKey(collective, _shape(ranks, facts["ranks_per_node"], bench.world_size)): Measured(
            Curve.fit(by_size), today, version
        )
        for (collective, ranks), by_size in samples.items()
    }
    return bench.agree(
        lambda: Cluster(
            name=f"{bench.world_size} x {device} ({bench.backend})",
            device="cpu" if cpu else device,
            world_size=bench.world_size,
            ranks_per_node=facts["ranks_per_node"],
            curves=curves,
            backend=bench.backend,
            versions=versions,
            provenance=today,
            overlap=overlap,
            overlap_provenance=today if cpu else "modelled by separate engines",
            uniform=cpu,
            device_memory_bytes=_device_memory(bench.device, host, facts["ranks_per_node"]),
            host_memory_bytes=host["memory_bytes"] or None,
        )
    )


def _shape(ranks: int, ranks_per_node: int, world_size: int) -> GroupShape:
    """The shape of groups of consecutive ranks that fill the world."""
    return GroupShape.of_axis({"": world_size // ranks, "x": ranks}, "x", ranks_per_node)


def _first_round(
    bench: Bench,
    collectives: Sequence[str],
    sizes: Sequence[int],
    shapes: Sequence[int],
    budget_s: float,
) -> list[Timing]:
    """Every case once, growing; a curve that has become too slow for the budget grows no more."""
    going = [(collective, ranks) for ranks in shapes for collective in collectives]
    for collective, ranks in going:
        bench.time(collective, ranks, sizes[0])  # connects the ranks
    timings: list[Timing] = []

    def bearable(row: list[Timing]) -> list[tuple[str, int]]:
        limit = budget_s / 10
        return [(t.case.collective, t.case.ranks) for t in row if t.seconds < limit]

    for size in sizes:
        row = [_time(bench, Case(collective, ranks, size), 1) for collective, ranks in going]
        timings += row
        going = bench.agree(partial(bearable, row))
    return timings


def _more_rounds(bench: Bench, first: list[Timing], deadline: float) -> list[Timing]:
    """All cases in turn, again and again; one sits out once it has used its share of the time."""
    repeats = bench.agree(lambda: {t.case: _repeats(t.seconds) for t in first})
    share = max(0.0, deadline - time.perf_counter()) / len(first)
    used = dict.fromkeys(repeats, 0.0)

    def choose(turn: int) -> list[Case]:
        if turn >= _LEAST_ROUNDS and time.perf_counter() > deadline:
            return []
        return [case for case in used if turn < _LEAST_ROUNDS or used[case] < share]

    timings: list[Timing] = []
    for turn in range(1, _MOST_ROUNDS):
        cases = bench.agree(partial(choose, turn))
        for case in cases:
            timings.append(_time(bench, case, repeats[case]))
            used[case] += timings[-1].seconds * repeats[case]
    return timings


def _repeats(seconds: float) -> int:
    return max(1, min(20, int(_REPEAT_S / seconds)))


def _time(bench: Bench, case: Case, repeats: int) -> Timing:
    seconds = bench.time(case.collective, case.ranks, case.nbytes, repeats)
    return Timing(case, seconds)


def _means_over_ranks(
    bench: Bench, timings: list[Timing]
) -> dict[tuple[str, int], dict[int, list[float]]]:
    """The timings by curve and true message size."""
    columns = bench.gather([timing.seconds for timing in timings])
    table: dict[tuple[str, int], dict[int, list[float]]] = {}
    for timing, row in zip(timings, zip(*columns, strict=True), strict=True):
        case = timing.case
        curve = table.setdefault((case.collective, case.ranks), {})
        curve.setdefault(bench.message_bytes(case.ranks, case.nbytes), []).append(
            sum(row) / len(row)
        )
    return table


def _versions(backend: str) -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    if backend == "nccl":
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def _device_memory(device: torch.device, host: dict[str, Any], sharing: int) -> int | None:
    """Bytes that one rank may fill: the GPU's, or its part of the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host["memory_bytes"] // sharing or None


def _alone() -> Cluster:
    """The cluster of one process: nothing to send."""
    host = Host.here()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    return Cluster(
        name=f"one {device_name(device)}",
        device=device_name(device) if cuda else "cpu",
        world_size=1,
        ranks_per_node=1,
        curves={},
        backend="none",
        versions={"torch": str(torch.__version__)},
        provenance=f"measured {date.today()} on {host.name}",
        overlap=1.0,
        overlap_provenance="modelled by nothing to send",
        device_memory_bytes=_device_memory(device, host.facts(), 1),
        host_memory_bytes=host.memory_bytes or None,
    )
