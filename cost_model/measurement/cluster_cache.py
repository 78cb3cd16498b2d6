"""Measured clusters on disk, by the machines they were measured on, and a check of their validity.

A cached cluster is checked when it is read: a few all-reduces are timed. It is invalid if one of
them takes `FACTOR` times longer or shorter than its error bar allows, twice in a row.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch

from autopar.cost_model import disk_cache
from autopar.cost_model.cluster.cluster import SCHEMA_VERSION, Cluster
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.measurement.bench import Bench
from autopar.cost_model.measurement.sampling import Layouts

FACTOR = 2.0
"""Factor by which a time may exceed its error bar."""

_KIND = "clusters"  # of files in the cache
_TRIALS = 3
_LONGEST_S = 0.02  # longest time that the check repeats


def read_cluster(facts: Mapping[str, Any]) -> tuple[Cluster, float] | None:
    """The cached cluster of these conditions, and its budget in seconds; None without any."""

    def parse(data: Any) -> tuple[Cluster, float] | None:
        if data["schema"] != SCHEMA_VERSION or disk_cache.digest(
            data["facts"]
        ) != disk_cache.digest(facts):
            return None
        budget_s = disk_cache.check_numbers({"budget_s": data["budget_s"]})["budget_s"]
        return Cluster.from_dict(data["cluster"]), budget_s

    return disk_cache.read_cached(_KIND, facts, parse)


def write_cluster(facts: Mapping[str, Any], cluster: Cluster, budget_s: float) -> None:
    """Replaces the cached cluster; warns if that fails."""
    data = {"schema": SCHEMA_VERSION, "facts": dict(facts), "budget_s": budget_s}
    disk_cache.write_cached(_KIND, facts, {**data, "cluster": cluster.to_dict()})


def deviation(bench: Bench, cluster: Cluster, layouts: Layouts) -> str | None:
    """The first outdated time of a measured cluster, in words, or None; every rank calls it."""
    # The smallest, the middle and the largest quick size of the widest group's first curve.
    key = max(layouts, key=lambda key: (key.shape.ranks, key.collective == "all_reduce"))
    curve = cluster.curves[key].curve
    quick = [n for n in curve.bytes if curve(n) <= _LONGEST_S] or [curve.bytes[0]]
    for nbytes in sorted({quick[0], quick[len(quick) // 2], quick[-1]}):
        for _ in range(2):
            found = _compare(bench, cluster, layouts, key, nbytes)
            if found is None:
                break
        else:
            return found
    return None


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
