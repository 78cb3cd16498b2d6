"""The arithmetic of regret, and the enumeration of plans."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.regret.__main__ import near
from benchmarks.regret.models import CASES
from benchmarks.regret.plans import Layout, enumeration
from benchmarks.regret.score import COMPARED, entries, summary, verdict
from benchmarks.regret.worker import names


def result(name: str, step_s: float, peak: int, **more: Any) -> dict[str, Any]:
    losses = [1.0] * 3
    seconds = [step_s, step_s, 9.0]
    return {"contender": name, "error": None, "seconds": seconds, "peak_bytes": peak} | {
        "losses": losses,
        **more,
    }


def plan(name: str, step_s: float, peak: int, predicted_s: float, **more: Any) -> dict[str, Any]:
    return result(name, step_s, peak, predicted_s=predicted_s, predicted_bytes=peak, **more)


def race(*more: dict[str, Any]) -> dict[str, Any]:
    """DDP takes 2 s; of plans the one predicted to be second is the fastest, at 1 s."""
    found = [
        result("ddp", 2.0, 1000),
        result("fully_shard", 3.0, 500),
        plan("zero0", 1.2, 1000, 0.9, batch_bytes=10),
        plan("zero3", 1.5, 500, 1.6),
        plan("tp2", 1.0, 700, 1.0),
        plan("pp2", 4.0, 300, 4.0),
    ]
    facts = {"model": "m", "cluster": "2x1", "rate": "1gbit", "reference": [1.0] * 3}
    return {**facts, "contenders": [*found, *more]}


def chosen(name: str, same: str) -> dict[str, Any]:
    made = {"contender": name, "error": None, "same": same}
    return {**made, "predicted_s": 1.0, "predicted_bytes": 600}


def test_regret_is_over_the_best_of_all() -> None:
    found = verdict(race(chosen("chosen", "zero0")), None)
    assert (found["chosen"], found["best"], found["by_prediction"]) == ("zero0", "tp2", "zero0")
    assert found["regret"] == found["regret_by_prediction"] == pytest.approx(1.2)
    assert found["gain"] == pytest.approx(2.0 / 1.2)
    assert found["median_error"] == pytest.approx((0.1 / 1.5 + 0.0) / 2)
    assert found["order"] == pytest.approx(0.8)


def test_predictions_are_compared_with_the_mean_rank_too() -> None:
    given = race()
    for each in given["contenders"]:
        each["mean_seconds"] = [0.5 * s for s in each["seconds"]]
    found = verdict(given, None)
    assert found["median_error"] == verdict(race(), None)["median_error"]
    assert found["median_error_of_mean_rank"] == pytest.approx(2.0 - 1.0)


def test_a_cap_compares_contenders_that_fit_by_counted_bytes() -> None:
    wrong = plan("wrong", 0.5, 900, 5.0) | {"predicted_bytes": 100}
    given = race(wrong, chosen("chosen under 0.6", "zero3"))
    found = verdict(given, 0.6)
    assert found["cap_bytes"] == 600
    assert (found["chosen"], found["best"]) == ("zero3", "zero3")
    assert found["regret"] == 1.0
    assert found["gain"] == pytest.approx(2.0)  # over fully_shard, for DDP does not fit
    assert found["exceeding"] == ["wrong"]


def test_a_contender_with_other_losses_does_not_count() -> None:
    wrong = plan("wrong", 0.1, 100, 0.1) | {"losses": [1.0, 1.1, 1.0]}
    found = verdict(race(wrong, chosen("chosen", "tp2")), None)
    assert (found["best"], found["regret"]) == ("tp2", 1.0)


def test_regret_is_infinite_without_a_chosen_plan() -> None:
    lost = {"contender": "chosen", "error": "OutOfMemoryError: nothing fits"}
    cases = [verdict(race(own), None) for own in (lost, chosen("chosen", "zero0"))]
    found = summary(cases)
    assert found["worst"] == float("inf")
    assert found["gain"] == pytest.approx(2.0 / 1.2)


@pytest.mark.parametrize(
    ("model", "cluster", "there", "absent"),
    [
        ("deep", "2x2", ("pp4, interleaved", "hybrid", "tp2, zero3", "pp2, tp2"), ("ep2", "pp8")),
        ("moe", "4x1", ("ep4", "ep2"), ("hybrid", "zero0, by level")),
        ("conv", "2x1", ("pp2, 1f1b", "tp2", "fully_shard"), ("tp4", "ep2")),
    ],
)
def test_enumeration(
    model: str, cluster: str, there: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    layout = Layout.of(cluster)
    found = names(CASES[model], layout, (None, 0.6))
    assert found[-2:] == ("chosen", "chosen under 0.6")
    assert set(there) <= set(found)
    assert not set(absent) & set(found)
    for strategy in enumeration(CASES[model], layout).values():
        strategy.mesh(layout.ranks)  # divides the ranks


def test_losses_are_compared_before_rounding_has_grown() -> None:
    given = race()
    given["reference"] = [1.0] * 40
    late, early = given["contenders"][0], given["contenders"][1]
    late["losses"] = [1.0] * COMPARED + [1.1] * 20
    early["losses"] = [1.0, 1.1] + [1.0] * 20
    found = entries(given)
    assert found["ddp"].error is None
    assert "losses differ by 1.0e-01" in str(found["fully_shard"].error)


def test_only_what_was_near_runs_again(tmp_path: Path) -> None:
    steps = {"zero0": (10.0, 100), "tp2": (12.0, 90), "pp2": (20.0, 50), "zero3": (26.0, 60)}
    rows = {name: {"step_ms": ms, "peak_bytes": size} for name, (ms, size) in steps.items()}
    earlier = {"model": "deep", "cluster": "2x1", "contenders": rows | {"ep2": {"error": "none"}}}
    (tmp_path / "kept.json").write_text(json.dumps({"races": [earlier]}))
    layout, peers = Layout.of("2x1"), {"ddp", "fully_shard"}
    names = near(tmp_path / "kept.json", "deep", layout, (None, 0.7))
    assert names == peers | {"zero0", "tp2", "pp2", "chosen", "chosen under 0.7"}
    assert not near(tmp_path / "kept.json", "wide", layout, (None,))
