"""Error bars are those of the validations that are kept."""

import json
from pathlib import Path

import numpy as np
import pytest

from autopar.core.plan.prediction import Prediction
from autopar.report.error_bars import (
    MEMORY,
    STEPS,
    PredictionInterval,
    memory_interval,
    step_interval,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FAMILIES = (
    *("sc21", "h100", "mpt", "torchtitan", "fms"),
    *("mpt-a100", "bigscience", "mt-nlg", "torchtitan-long"),
)
PUBLISHED, PREDICTION = RESULTS / "published", RESULTS / "prediction"


def published(*names):
    """Predicted by published; steps are the shorter the more TFLOP/s there are."""
    tables = [
        json.loads((PUBLISHED / f"published-{name}.json").read_text())["tables"] for name in names
    ]
    return [
        row["predicted"] / row["published"] for t in tables for rows in t.values() for row in rows
    ]


def reserved(name):
    """Bytes that torch reserved over the predicted peak of tensors."""
    tables = json.loads((PUBLISHED / f"published-{name}.json").read_text())["tables"]
    rows = [row for rows in tables.values() for row in rows if row["reserved_gib"]]
    return [row["reserved_gib"] / row["peak_gib"] for row in rows]


def counted(name):
    groups = json.loads((PREDICTION / name).read_text())["predicted_and_measured"].values()
    return [measured / predicted for pairs in groups for predicted, measured in pairs]


@pytest.mark.parametrize(
    ("bar", "ratios"),
    [
        (STEPS["measured"], counted("prediction-steps-2026-11-21.json")),
        (
            STEPS["modelled"],
            published(
                *(f"{name}-2026-12-02" for name in FAMILIES),
            ),
        ),
        (MEMORY["measured"], counted("prediction-memory-2026-11-21.json")),
        (
            MEMORY["modelled"],
            [1 / r for r in published("activations-2026-11-22")]
            + reserved("torchtitan-2026-12-02")
            + reserved("torchtitan-long-2026-12-02"),
        ),
    ],
)
def test_nine_in_ten_cases_lie_within(bar, ratios):
    low, high = np.quantile(ratios, [0.05, 0.95])
    assert (bar.low, bar.high) == pytest.approx((min(low, 1.0), max(high, 1.0)), abs=0.006)
    assert bar.source.startswith(str(len(ratios)))


def test_bars_are_of_what_figures_are():
    here = Prediction(1.0, 0.1, 0.8, 0.0, 0.0, 100, provenance={"measured": 9, "modelled": 2})
    there = Prediction(
        1.0, 0.1, 0.8, 0.0, 0.0, 100, context_bytes=5, provenance={"imported": 1, "modelled": 9}
    )
    assert (step_interval(here), memory_interval(here)) == (STEPS["measured"], MEMORY["measured"])
    assert (step_interval(there), memory_interval(there)) == (STEPS["modelled"], MEMORY["modelled"])
    assert PredictionInterval(0.5, 2.0, "").of_rate(10.0) == (5.0, 20.0)
