"""The programs that live ranks time before a mesh is planned."""

from typing import Any

import pytest

import autopar
from autopar.core.common.deadline import Deadline
from autopar.session import live
from tests.harness.models import MODELS
from tests.planner.problems import problem_of


@pytest.mark.parametrize(
    ("solutions", "measured"),
    [("aa", "a"), ("abb", "ab"), ("aba", "ab"), ("abcd", "abc")],
    ids=str,
)
def test_solutions_of_measured_times_are_measured(
    solutions: str, measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each solution is made with the last measurement, until one comes again or three are timed."""
    left, machines, timed = list(solutions), list[Any](), list[str]()

    def solve(problem: Any, graphs: Any, machine: Any) -> str:
        machines.append(machine)
        return left.pop(0)

    def lower(problem: Any, graphs: Any, solution: str, *, live: bool) -> str:
        assert live
        return solution

    def measure(problem: Any, programs: str, *, live: bool, known: Any) -> str:
        assert live
        assert known is machines[-1]
        timed.append(programs)
        return f"times of {programs}"

    monkeypatch.setattr(live, "strategies_to_replay", solve)
    monkeypatch.setattr(
        live.LiveDriver, "_for_own_rows", lambda self, problem, graphs, solution: solution
    )
    monkeypatch.setattr(live, "programs_to_time", lower)
    monkeypatch.setattr(live, "measure_programs", measure)
    problem = problem_of(MODELS["gpt"].make(), autopar.Strategy(tp=2))
    driver = live.LiveDriver(problem, lambda *sizes: None, Deadline(None), None, None)  # type: ignore[arg-type, return-value]
    assert driver.measure(problem, {}) == f"times of {measured[-1]}"  # type: ignore[comparison-overlap]
    assert "".join(timed) == measured
    assert machines == [None, *(f"times of {each}" for each in solutions)][: len(machines)]
