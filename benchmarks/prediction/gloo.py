"""The gloo groups of part `curves`: groups of twice as many ranks as were measured.

Where the fabric is uniform, a cluster answers for groups that it has no curve of. Here ranks are
measured in groups of every shape, and twice as many nodes or ranks in one group, which the first
are to predict.
"""

from __future__ import annotations

from typing import Any

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.group_shape import GroupShape
from benchmarks.cluster import Unavailable
from benchmarks.prediction.report import summary
from benchmarks.prediction.settings import Setting, measured

DOUBLED = (
    (Setting(2, 1, "1gbit"), Setting(4, 1, "1gbit")),
    (Setting(2, 1, "100mbit"), Setting(4, 1, "100mbit")),
    (Setting(4, 1, "100mbit"), Setting(8, 1, "100mbit")),
    (Setting(1, 4), Setting(1, 8)),
)
"""2 nodes -> 4 nodes, and 4 ranks -> 8 ranks."""

BUDGET_S = 20.0


def run(options: Any) -> dict[str, Any]:
    """Errors of all pairs together. `options.quick` takes the first pair, shorter."""
    quick = getattr(options, "quick", False)
    budget_s = BUDGET_S / 4 if quick else BUDGET_S
    cases: list[dict[str, Any]] = []
    refused: list[str] = []
    for small, large in DOUBLED[:1] if quick else DOUBLED:
        try:
            known = measured(small, budget_s)
            truth = measured(large, budget_s, mesh=f"x={large.world_size}")
        except Unavailable as reason:
            refused.append(f"{small} -> {large}: {reason}")
            continue
        cases += compare(f"{small} -> {large}", known, truth)
    return {**summary(cases), "refused": refused}


def compare(name: str, small: Cluster, large: Cluster) -> list[dict[str, Any]]:
    """What `small`, of fewer ranks, predicts for the points of `large`."""
    cases = []
    for key, entry in sorted(large.curves.items()):
        assert key.shape == GroupShape(large.world_size, large.ranks_per_node)
        for nbytes, seconds in zip(entry.curve.bytes, entry.curve.seconds, strict=True):
            predicted = small.seconds(key.collective, nbytes, key.shape, key.dtype)
            cases.append(
                {
                    "group": name,
                    "collective": key.collective,
                    "bytes": nbytes,
                    "predicted": predicted.seconds,
                    "measured": seconds,
                    "error": abs(predicted.seconds / seconds - 1),
                    "error_bar": predicted.error,
                }
            )
    return cases
