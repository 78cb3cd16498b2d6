"""Notes of plans by arithmetic: their sources, what they leave out, and how to do without."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.planner.extended.derivation import MOST_MEMORY, MOST_STEP
from autopar.planner.extended.reduced_models import only_few_blocks
from tests.planner.blocks import GPTBlock, Stack

RESULTS = Path(__file__).parents[3] / "benchmarks/results/planning/whole-2026-12-02.json"


def test_the_largest_differences_are_those_that_were_measured() -> None:
    rows = [row["ratio"] for row in json.loads(RESULTS.read_text())["rows"] if "ratio" in row]
    assert len(rows) >= 40
    for figure, most in (("step_s", MOST_STEP), ("needed_bytes", MOST_MEMORY)):
        measured = max(abs(ratio[figure] - 1.0) for ratio in rows)
        assert most - 0.01 <= measured <= most


def planned(depth: int, limit_s: float | None, **strategy: Any) -> autopar.Plan:
    with torch.device("meta"):
        model, x = Stack(lambda: GPTBlock(256, 8), depth), torch.empty(32, 128, 256)
    return autopar.plan(
        model,
        16,
        example_inputs=(x,),
        cluster=autopar.Cluster.named("dgx-h100", 2),
        strategy=autopar.Strategy(**strategy),
        time_limit_s=limit_s,
    )


@pytest.mark.parametrize(
    ("depth", "strategy", "source"),
    [
        (12, {"zero": 3}, "12 blocks from 2 and 3."),
        (
            12,
            {"pp": 2, "zero": 1, "schedule": "1f1b", "micro_batches": 4},
            "2 stages of 12 blocks from 3 stages of 2 and 3 each.",
        ),
    ],
    ids=["ZeRO", "stages"],
)
def test_a_plan_by_arithmetic_says_so_until_it_is_lowered_whole(
    depth: int, strategy: dict[str, Any], source: str
) -> None:
    with only_few_blocks():
        few = planned(depth, 600.0, **strategy)
    (note,) = (note for note in few.notes if note.startswith("predicted by arithmetic"))
    assert source in note
    assert note.endswith("fix its axes in the strategy and give a longer time limit")
    whole = planned(depth, 600.0, **strategy)  # as the note says
    assert not whole.bucket_bytes
    assert not [note for note in whole.notes if note.startswith("predicted by arithmetic")]
