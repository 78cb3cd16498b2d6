"""What the table, the short answer and the page say of a search."""

import html
import re
from dataclasses import replace

import pytest

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction, RunnerUp
from autopar.core.plan.search_outcome import PracticePlan, SearchOutcome
from autopar.core.plan.strategy import UNUSED, Strategy
from autopar.report.brief import brief, figures
from autopar.report.html.alternatives import runners
from autopar.report.html.summary import summary
from autopar.report.verdict import verdict_lines
from tests.harness.models import MODELS
from tests.planner.problems import problem_of


def searched(outcome: SearchOutcome) -> Plan:
    base = problem_of(MODELS["gpt"].make(), Strategy()).base()
    cost = Prediction(0.1, 0.0, 0.1, 0.0, 0.0, peak_bytes=1)
    return replace(base, prediction=cost, search=outcome)


def test_gain_bound_and_gap() -> None:
    plan = searched(SearchOutcome(3, 2, 0.09, "zero3", 0.12, complete=False))
    verdict, extent = verdict_lines(plan)
    than = "20.0% faster than the best of DDP and fully_shard (zero3: 120 ms)"
    assert verdict == f"verdict: {than}, by prediction"
    assert extent.startswith("time ran out: planned 3 meshes")
    assert extent.endswith("no plan takes less than 90.0 ms, so the gap is 10.0%")
    loose = replace(plan, search=SearchOutcome(3, 2, 0.01, "zero3", 0.12, complete=False))
    assert [*verdict_lines(loose)][1].endswith("may exist: raise --time-limit")
    assert "20.0% faster" in brief(plan)
    assert "a better plan saves at most 10.0%" in " ".join(brief(plan).split())
    assert "a better plan may exist: raise --time-limit" in " ".join(brief(loose).split())
    assert "20.0% faster" in summary(plan)
    assert figures(plan)["search"]["gap"] == pytest.approx(0.1)


def test_no_baseline_and_no_bound() -> None:
    verdict, extent = verdict_lines(searched(SearchOutcome(1)))
    assert verdict == "verdict: DDP and fully_shard were not predicted"
    assert extent.endswith("; no bound is proven")
    assert not list(verdict_lines(replace(searched(SearchOutcome()), search=None)))


def test_the_verdict_names_what_was_predicted() -> None:
    own = RunnerUp("zero3", 0.12, 2, "")
    verdict, *_ = verdict_lines(searched(SearchOutcome(0, 0, 0.09, "zero3", 0.12, fsdp=own)))
    assert verdict.startswith("verdict: 20.0% faster than fully_shard (zero3")
    verdict, *_ = verdict_lines(searched(SearchOutcome(1, ddp=own)))
    assert verdict == "verdict: neither DDP nor fully_shard was found to fit"


def test_the_verdict_compares_with_each_usual_layout_by_name() -> None:
    practice = (
        PracticePlan("DDP", why="needs 1 B more than the cap"),
        PracticePlan("FSDP", "zero3", 0.12, needed_bytes=3),
        PracticePlan("FSDP with recomputation", why="not needed, since FSDP fits without"),
        PracticePlan("Megatron's", "tp8, zero1", 0.1, needed_bytes=2),
        PracticePlan("HSDP", why="lacks 2 B"),
    )
    plan = searched(SearchOutcome(3, 2, 0.09, "zero3", 0.12, practice=practice))
    verdict, others, _ = verdict_lines(plan)
    assert verdict == (
        "verdict: by prediction no DDP: needs 1 B more than the cap; 20.0% faster than FSDP "
        "(120 ms); no FSDP with recomputation: not needed, since FSDP fits without; as fast as "
        "Megatron's (100 ms)"
    )
    assert others == "other usual layouts: no HSDP: lacks 2 B"
    for text in (" ".join(brief(plan).split()), html.unescape(summary(plan))):
        assert verdict.removeprefix("verdict: ") in text
    also = plan.explain().split("Also considered:\n")[1].splitlines()
    assert also == [
        "  tp8, zero1 (Megatron's): 100 ms, 2 B: as fast as the plan",
        "  zero3 (FSDP): 120 ms, 3 B: 16.7% slower than the plan",
        "  DDP: needs 1 B more than the cap",
        "  FSDP with recomputation: not needed, since FSDP fits without",
        "  HSDP: lacks 2 B",
    ]
    table = html.unescape(re.sub("<[^>]*>", " ", runners(plan)))
    for name in ("tp8, zero1 Megatron's", "zero3 FSDP", "HSDP lacks 2 B", "DDP needs 1 B more"):
        assert name in " ".join(table.split())


@pytest.mark.parametrize(
    ("mesh", "few"),
    [
        ((("dp", 1), ("tp", 8)), "one device is enough"),
        ((("dp", 2), ("tp", 4)), "2 devices are enough"),
        ((("dp", 8),), "20.0% faster"),
    ],
)
def test_ranks_that_repeat_the_others_are_no_gain(
    mesh: tuple[tuple[str, int], ...], few: str
) -> None:
    plan = searched(SearchOutcome(3, 2, 0.09, "zero3", 0.12))
    plan = replace(plan, mesh=mesh, world_size=8, notes=(UNUSED.format("tp"),))
    assert few in next(verdict_lines(plan))
    assert few in brief(plan)
    assert few in summary(plan)
