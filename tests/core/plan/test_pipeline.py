"""Stages of a pipeline: on which ranks they lie, and how many of them a rank has."""

import re
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.core.plan.pipeline import Pipeline
from autopar.errors import PlanError, StrategyError

SAVED = Path(__file__).parent / "schema_6" / "pipeline.json"


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
def test_both_ends_of_a_v_are_on_rank_0(schedule: str) -> None:
    uses = tuple((f"layers.{stage}", (stage,)) for stage in range(6))
    pipeline = Pipeline(3, schedule, 4, 2, uses)
    assert [pipeline.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [pipeline.stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert pipeline.held(0) == {"layers.0", "layers.5"}
    assert Pipeline(3, "interleaved", 4, 2, uses).held(0) == {"layers.0", "layers.3"}


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
def test_a_v_has_two_stages_a_rank(schedule: Any) -> None:
    assert autopar.Strategy(pp=2, schedule=schedule).stages == 4
    assert autopar.Strategy(pp=2, schedule=schedule, stages_per_rank=2).stages == 4
    for number in (1, 3):
        with pytest.raises(StrategyError, match=f"{schedule}.* runs two stages on a rank: give"):
            autopar.Strategy(pp=2, schedule=schedule, stages_per_rank=number)
    with pytest.raises(StrategyError, match="4 stages have 3 cuts"):
        autopar.Strategy(pp=2, schedule=schedule, split_points=("layers.1",))


def test_a_plan_whose_v_has_other_stages_is_refused() -> None:
    document = autopar.Plan.load(SAVED).to_dict()
    document["pipeline"]["schedule"] = "zbv"
    message = re.escape("$.pipeline.stages_per_rank is 1: zbv has 2 stages on a rank")
    with pytest.raises(PlanError, match=message):
        autopar.Plan.from_dict(document)
