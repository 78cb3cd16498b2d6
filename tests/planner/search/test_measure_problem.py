"""The programs that are timed before a search."""

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.cost_model.measurement.step_replay import SINGLE_RANK, TimedProgram
from autopar.planner.search import measure_problem as measuring
from autopar.planner.search.measure_problem import strategies_to_replay
from tests.harness.models import MODELS
from tests.planner.problems import problem_of


class _StopError(Exception):
    """Ends the measurement before it begins."""


@pytest.mark.parametrize(
    "sizes",
    [
        {"pp": 4, "micro_batches": 4},
        {"pp": 2, "tp": 2, "micro_batches": 2},
        {"pp": 2, "micro_batches": 2},
        {"tp": 4, "micro_batches": 2},
        {"micro_batches": 2},
    ],
    ids=str,
)
def test_programs_of_one_micro_batch_run(
    sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is summed over the micro-batches, which no program of one of them can do."""
    programs: list[TrainingGraph] = []

    def stop(graphs: list[TrainingGraph], *rest: Any, **options: Any) -> None:
        programs.extend(graphs)
        raise _StopError

    monkeypatch.setattr(measuring, "measure_machine", stop)
    case, strategy = MODELS["gpt"], autopar.Strategy(**sizes, zero=0)  # type: ignore[arg-type]
    model, count = case.make(), sizes["micro_batches"]
    problem = problem_of(model, strategy, memory=1 << 40)
    inputs = case.batch(8, 0)[0]
    graph = capture_of_rank(model, inputs, 0, problem.dp_size, micro_batches=count)
    with pytest.raises(_StopError):
        measuring.measure_problem(problem, {count: graph})
    assert programs
    for program in programs:
        assert TimedProgram(program).run(SINGLE_RANK)


@pytest.mark.parametrize("fits", [True, False])
def test_ranks_with_fewer_rows_time_the_strategies_of_rank_0_if_these_fit(fits: bool) -> None:
    case = MODELS["gpt"]
    model, problem = case.make(), problem_of(case.make(), autopar.Strategy(tp=2))
    first, other = (capture_of_rank(model, case.batch(7, 0)[0], rank, 2) for rank in (0, 1))
    (solved,) = strategies_to_replay(problem, {1: first}).values()
    if fits:
        solved = replace(solved, op_strategies=solved.undivided)
    assert (solved.for_rows_of(other, problem) is not None) == fits
    assert solved.for_rows_of(first, problem) == solved.op_strategies
    assert solved.undivided == ((),)
