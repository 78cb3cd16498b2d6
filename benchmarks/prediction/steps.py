"""Part `steps`: predicted and measured step times of the models of the parity tests.

`tests/harness/models.py` at eight times its sizes (1 to 5 million parameters, steps of 50 to 500
ms), under every ZeRO stage and partitioned over all ranks, with and without recomputation, on 2 and
4 processes, on one host and on the emulated cluster. In each setting the ranks keep all plans of a
model. Several times over, because the machine drifts, they measure collectives and operators as
`autopar.compile` does, predict, and then train all plans in turn. Nothing is fitted to measured
steps. `others` of a case is the share of the cores that other processes took.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scipy.stats import spearmanr

from benchmarks.cluster import Unavailable
from benchmarks.prediction.report import medians, summary
from benchmarks.prediction.settings import Setting

SCALE = 8
ROWS = {"gpt": 16, "dropout": 16, "encoder": 16, "conv": 64, "encdec": 8, "moe": 8, "odd": 64}
"""Rows of the global batch of each model."""

SETTINGS = (Setting(1, 2), Setting(1, 4), Setting(2, 1, "1gbit"), Setting(2, 2, "1gbit"))

CYCLES, STEPS = 6, 2
"""Number of measurements, and steps of each plan in each."""


def run(options: Any) -> dict[str, Any]:
    """Return errors of all plans; `options.quick` takes two models, two processes, one cycle."""
    quick = options.quick
    cases: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    for setting in SETTINGS[:1] if quick else SETTINGS:
        for model in ("gpt", "conv") if quick else ROWS:
            try:
                cases += measure(setting, model, 1 if quick else CYCLES)
            except Unavailable as reason:
                skipped[str(setting)] = str(reason)
    orders = rank_correlations(cases)
    return {
        **summary(cases),
        "worst_order": min(orders.values(), default=None),
        "others": median(case["others"] for case in cases) if cases else None,
        **{f"by_{field}": medians(cases, field) for field in ("setting", "model")},
        "orders": orders,
        "skipped": skipped,
    }


def measure(setting: Setting, model: str, cycles: int = CYCLES) -> list[dict[str, Any]]:
    """Return a case for each plan of one model in one setting."""
    with tempfile.TemporaryDirectory(prefix="autopar-steps-") as folder:
        result = Path(folder, "cases.json")
        arguments = [str(result), model, str(ROWS[model]), str(cycles), str(STEPS)]
        module = "benchmarks.prediction.steps_rank"
        setting.run(module, *arguments, AUTOPAR_TEST_SCALE=str(SCALE))
        plans: list[dict[str, Any]] = json.loads(result.read_text())
    facts = {"setting": str(setting), "model": model}
    return [{"group": f"{setting}, {model}", **facts, **plan} for plan in plans]


def rank_correlations(cases: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return Spearman's correlation of predicted and measured times of each model's plans."""
    found = {}
    for group in dict.fromkeys(case["group"] for case in cases):
        plans = [case for case in cases if case["group"] == group]
        columns = [[plan[key] for plan in plans] for key in ("predicted", "measured")]
        found[group] = float(spearmanr(*columns).statistic)
    return found
