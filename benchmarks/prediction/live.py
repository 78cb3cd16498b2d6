"""Part `live`: a measured cluster predicts second measurements.

In each setting `autopar measure` runs twice, in processes of its own each time. The curves of the
first run predict the second: the same collectives, groups and sizes, and sizes halfway between.

Other groups: where the fabric is uniform, groups of every shape predict one group of twice as many
nodes or ranks.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import mean
from typing import Any

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.measure import SIZES
from benchmarks.cluster import Unavailable
from benchmarks.prediction.report import case, medians, summary
from benchmarks.prediction.settings import Setting, measure_cluster

SETTINGS = (
    *(Setting(1, ranks) for ranks in (2, 3, 4)),
    *(Setting(*shape, rate) for rate in ("1gbit", "100mbit") for shape in ((2, 1), (2, 2), (4, 1))),
)
QUICK = (Setting(1, 2), Setting(2, 1, "1gbit"))

DOUBLED = (
    (Setting(2, 1, "1gbit"), Setting(4, 1, "1gbit")),
    (Setting(2, 1, "100mbit"), Setting(4, 1, "100mbit")),
    (Setting(4, 1, "100mbit"), Setting(8, 1, "100mbit")),
    (Setting(1, 4), Setting(1, 8)),
)
"""Settings with their doubles."""

BETWEEN = tuple(round((small * large) ** 0.5 / 64) * 64 for small, large in pairwise(SIZES))
"""Sizes halfway between those of the curves, in bytes."""

BUDGET_S = 30.0


def run(options: Any) -> dict[str, Any]:
    """Return errors of all settings, and of other groups; `options.quick` takes a few, shorter."""
    budget_s = BUDGET_S / 4 if options.quick else BUDGET_S
    cases: list[dict[str, Any]] = []
    refused: list[str] = []
    for setting in QUICK if options.quick else SETTINGS:
        try:
            first = measure_cluster(setting, budget_s)
            second = measure_cluster(setting, 1.5 * budget_s, sizes=(*SIZES, *BETWEEN))
        except Unavailable as reason:
            refused.append(f"{setting}: {reason}")
            continue
        cases += compare(str(setting), first, second)
    return {
        **summary(cases),
        **{f"by_{field}": medians(cases, field) for field in ("group", "size", "collective")},
        "within_error_bar": mean(c["error"] <= c["error_bar"] for c in cases) if cases else None,
        "refused": refused,
        "other_groups": other_groups(DOUBLED[:1] if options.quick else DOUBLED, budget_s / 1.5),
    }


def other_groups(pairs: tuple[tuple[Setting, Setting], ...], budget_s: float) -> dict[str, Any]:
    """Return errors of predictions for groups of twice as many ranks."""
    cases: list[dict[str, Any]] = []
    refused: list[str] = []
    for small, large in pairs:
        try:
            known = measure_cluster(small, budget_s)
            doubled = measure_cluster(large, budget_s, mesh=f"x={large.ranks}")
        except Unavailable as reason:
            refused.append(f"{small} -> {large}: {reason}")
            continue
        cases += compare(f"{small} -> {large}", known, doubled)
    return {**summary(cases), "refused": refused}


def compare(group: str, known: Cluster, measured: Cluster) -> list[dict[str, Any]]:
    """Return a case for every point of the curves of `measured`, predicted by `known`."""
    cases = []
    for key, entry in sorted(measured.curves.items()):
        sizes = known.curves[key].curve.bytes if key in known.curves else ()
        for nbytes, seconds in zip(entry.curve.bytes, entry.curve.seconds, strict=True):
            cost = known.seconds(key.collective, nbytes, key.shape, key.dtype)
            facts = {
                "collective": key.collective,
                "shape": str(key.shape),
                "bytes": nbytes,
                "size": "measured" if nbytes in sizes else "between",
                "error_bar": cost.error,
            }
            cases.append(case(group, cost.seconds, seconds, **facts))
    return cases
