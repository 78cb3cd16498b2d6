"""What differs between two plans, as text."""

from dataclasses import replace

from torch import nn

from autopar.core.ir.placement import Shard
from autopar.core.plan.buckets import Buckets
from autopar.core.plan.compression import Compressions
from autopar.core.plan.partition import Partition
from autopar.core.plan.pipeline import Pipeline
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.strategy import Strategy
from tests.planner.problems import problem_of

PLAN = problem_of(nn.Linear(2, 2), Strategy()).base()


def lines(before: Plan, after: Plan) -> list[str]:
    return before.diff(after).splitlines()


def test_what_is_the_same_is_not_said() -> None:
    assert lines(PLAN, PLAN) == []
    assert lines(PLAN, replace(PLAN, prefetch=2)) == ["prefetch: 1 -> 2"]


def test_blocks_that_changed_alike_are_said_once() -> None:
    names = ("", *(f"blocks.{i}" for i in range(5)))
    before = replace(PLAN, zero_stages=tuple((name, 0) for name in names))
    after = replace(PLAN, zero_stages=tuple((name, 3 if name else 1) for name in names))
    said = "(outside of blocks) 0 -> 1; blocks.0, blocks.1, blocks.2 and 2 more 0 -> 3"
    assert lines(before, after) == [f"zero_stages: {said}"]


def test_axes_and_stages() -> None:
    tp = Partition("tp", 2, (("up.weight", Shard(0)),))
    other = replace(tp, parameters=(("up.weight", Shard(1)), ("head.weight", Shard(0))))
    divided = replace(PLAN, mesh=(("dp", 2), ("tp", 2)), partitions=(tp,))
    assert lines(PLAN, divided) == [
        "mesh: dp 4 -> dp 2 x tp 2",
        "partitions: along tp too",
    ]
    (line,) = lines(divided, replace(divided, partitions=(other,)))
    assert line == "partitions: tp: up.weight S(0) -> S(1); head.weight R -> S(0)"
    uses = tuple((name, (stage,)) for name, stage in (("a", 0), ("b", 0), ("c", 1)))
    staged = replace(PLAN, pipeline=Pipeline(2, "1f1b", 4, uses=uses))
    alone = replace(PLAN, pipeline=Pipeline(1, "1f1b", 4))
    assert lines(PLAN, alone) == ["pipeline: none -> 4 micro-batches"]  # of no stages
    assert lines(PLAN, staged) == ["pipeline: none -> 2 stages, 1f1b, 4 micro-batches"]
    cut = replace(staged.pipeline, uses=(uses[0], ("b", (1,)), uses[2]))  # type: ignore[type-var]
    assert lines(staged, replace(staged, pipeline=cut)) == ["pipeline: stages begin with c -> b"]


def test_what_travels() -> None:
    three, two = (("a",), ("b",), ("c",)), (("a", "b"), ("c",))
    before, after = (
        replace(PLAN, buckets=Buckets(reduce=r), compressions=Compressions(reduce=("",) * len(r)))
        for r in (three, two)
    )
    assert lines(before, after) == ["buckets: reduce 3 -> 2"]
    narrow = replace(after, compressions=Compressions(reduce=("", "int8")))
    assert lines(after, narrow) == ["compressions: reduce whole -> int8 1 of 2"]


def test_what_it_takes_and_what_is_noted() -> None:
    cost = Prediction(0.2, 0.0, 0.1, 0.1, 0.1, 2**20)
    before, after = (replace(PLAN, prediction=replace(cost, step_s=s)) for s in (0.2, 0.3))
    said = "a step 200 ms -> 300 ms, of it waiting 100 ms -> 100 ms"
    assert lines(before, after) == [f"prediction: {said}; peak 1.0 MiB -> 1.0 MiB"]
    before, after = (replace(PLAN, notes=(note,)) for note in ("this", "that"))
    assert lines(before, after) == ["notes: - this + that"]
