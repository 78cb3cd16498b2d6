"""Measured clusters on disk, by the machines they were measured on, and a check of their validity.

A cached cluster is checked when it is read: a few all-reduces are timed. It is invalid if one of
them takes `FACTOR` times longer or shorter than its error bar allows, twice in a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.cost_model.cluster.cluster import SCHEMA_VERSION, Cluster
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.disk_cache import (
    cache_directory,
    check_numbers,
    digest,
    read_cached,
    write_json,
)
from autopar.cost_model.measurement.bench import Bench
from autopar.cost_model.measurement.sampling import Layouts

FACTOR = 2.0
"""Factor by which a time may exceed its error bar."""

_TRIALS = 3
_LONGEST_S = 0.02  # longest time that the check repeats


@dataclass(frozen=True)
class CachedCluster:
    """A measured cluster.

    Attributes:
        cluster: the cluster.
        budget_s: budget of its measurement, in seconds.
    """

    cluster: Cluster
    budget_s: float

    def serves(self, keys: Iterable[CurveKey], budget_s: float) -> bool:
        """Whether it has these curves, measured with at least that budget."""
        return self.budget_s >= budget_s and all(key in self.cluster.curves for key in keys)


@dataclass(frozen=True)
class ClusterCache:
    """The cache entry of some machines.

    Attributes:
        facts: conditions of a measurement on them.
    """

    facts: Mapping[str, Any]

    @property
    def path(self) -> Path:
        """The file, named after the facts."""
        return cache_directory() / "clusters" / f"{digest(self.facts)}.json"

    def read(self) -> CachedCluster | None:
        """The cached cluster; None if there is no readable one."""

        def parse(data: Any) -> CachedCluster | None:
            if data["schema"] != SCHEMA_VERSION or digest(data["facts"]) != digest(self.facts):
                return None
            budget_s = check_numbers({"budget_s": data["budget_s"]})["budget_s"]
            return CachedCluster(Cluster.from_dict(data["cluster"]), budget_s)

        return read_cached(self.path, parse)

    def write(self, cached: CachedCluster) -> None:
        """Replaces the cached cluster; warns if that fails."""
        data = {"schema": SCHEMA_VERSION, "facts": dict(self.facts), "budget_s": cached.budget_s}
        write_json(self.path, {**data, "cluster": cached.cluster.to_dict()})


def deviation(bench: Bench, cluster: Cluster, layouts: Layouts) -> str | None:
    """The first outdated time of a measured cluster, in words, or None; every rank calls it.

    Args:
        bench: the process group.
        cluster: the cached cluster.
        layouts: groups of its curves, as for `sample`.
    """
    for key, nbytes in _points(cluster, layouts):
        for _ in range(2):
            found = _compare(bench, cluster, layouts, key, nbytes)
            if found is None:
                break
        else:
            return found
    return None


def _points(cluster: Cluster, layouts: Layouts) -> list[tuple[CurveKey, int]]:
    """The smallest, the middle and the largest quick size of the widest group's first curve."""
    key = max(layouts, key=lambda key: (key.shape.ranks, key.collective == "all_reduce"))
    curve = cluster.curves[key].curve
    quick = [n for n in curve.bytes if curve(n) <= _LONGEST_S] or [curve.bytes[0]]
    return [(key, n) for n in sorted({quick[0], quick[len(quick) // 2], quick[-1]})]


def _compare(
    bench: Bench, cluster: Cluster, layouts: Layouts, key: CurveKey, nbytes: int
) -> str | None:
    """The deviation of a time from its cached value, in words, if it is too large."""
    groups, dtype = layouts[key][0], getattr(torch, key.dtype)
    expected = cluster.seconds(key.collective, nbytes, key.shape, key.dtype)
    repeats = max(1, min(10, int(_LONGEST_S / expected.seconds / 2)))
    bench.time(key.collective, groups, nbytes, 1, dtype)
    trials = [bench.time(key.collective, groups, nbytes, repeats, dtype) for _ in range(_TRIALS)]

    def judge() -> str | None:
        now = statistics.median(t for t in trials if t is not None)
        allowed = FACTOR * (1 + expected.error)
        if 1 / allowed < now / expected.seconds < allowed:
            return None
        return (
            f"{key.collective} of {nbytes} bytes over {key.shape} takes {now * 1e3:.3g} ms, "
            f"not {expected.seconds * 1e3:.3g} ms"
        )

    return bench.agree(judge)
