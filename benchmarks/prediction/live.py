"""Part `live`: a measured cluster predicts a second measurement of the same collectives.

In each setting `autopar measure` runs twice, in processes of its own each time. The first gives
the curves. The second is the truth: the same collectives, groups and sizes, and sizes halfway
between them, at which the curves were not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.collectives import COLLECTIVES
from autopar.cost_model.measurement.measure import SIZES
from benchmarks.cluster import Unavailable
from benchmarks.prediction.report import summary
from benchmarks.prediction.settings import Setting, measured

SETTINGS = (
    *(Setting(1, ranks) for ranks in (2, 3, 4)),
    *(Setting(*shape, rate) for rate in ("1gbit", "100mbit") for shape in ((2, 1), (2, 2), (4, 1))),
)
QUICK = (Setting(1, 2), Setting(2, 1, "1gbit"))

BETWEEN = tuple(round((small * large) ** 0.5 / 64) * 64 for small, large in pairwise(SIZES))
"""Sizes halfway between those of the curves."""

BUDGET_S = 30.0


def run(options: Any) -> dict[str, Any]:
    """Errors of all settings together, and of each. `options.quick` takes two settings, shorter."""
    quick = getattr(options, "quick", False)
    budget_s = BUDGET_S / 4 if quick else BUDGET_S
    cases: list[dict[str, Any]] = []
    refused: list[str] = []
    for setting in QUICK if quick else SETTINGS:
        try:
            first = measured(setting, budget_s)
            second = measured(setting, 1.5 * budget_s, sizes=(*SIZES, *BETWEEN))
        except Unavailable as reason:
            refused.append(f"{setting}: {reason}")
            continue
        cases += compare(str(setting), first, second)
    return {
        **summary(cases),
        "settings": {name: _median(cases, "group", name) for name in _names(cases)},
        "sizes": {name: _median(cases, "size", name) for name in ("measured", "between")},
        "collectives": {name: _median(cases, "collective", name) for name in COLLECTIVES},
        "within_error_bar": mean(c["error"] <= c["error_bar"] for c in cases) if cases else None,
        "refused": refused,
    }


def compare(setting: str, first: Cluster, second: Cluster) -> list[dict[str, Any]]:
    """What `first` predicts for every point that `second` has."""
    cases = []
    for key, entry in sorted(second.curves.items()):
        known = first.curves[key].curve.bytes
        for nbytes, seconds in zip(entry.curve.bytes, entry.curve.seconds, strict=True):
            predicted = first.seconds(key.collective, nbytes, key.shape, key.dtype)
            cases.append(
                {
                    "group": setting,
                    "collective": key.collective,
                    "shape": str(key.shape),
                    "bytes": nbytes,
                    "size": "measured" if nbytes in known else "between",
                    "predicted": predicted.seconds,
                    "measured": seconds,
                    "error": abs(predicted.seconds / seconds - 1),
                    "error_bar": predicted.error,
                }
            )
    return cases


def _median(cases: Sequence[dict[str, Any]], field: str, value: str) -> float | None:
    errors = [case["error"] for case in cases if case[field] == value]
    return median(errors) if errors else None


def _names(cases: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(case["group"] for case in cases))
