"""Which meshes are looked at, and which is chosen, from answers that a person can check."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from autopar.errors import BatchError, CaptureError, OutOfMemoryError
from autopar.plan import Plan
from autopar.planner.decide import Question
from autopar.planner.meshes import fastest_mesh, meshes
from autopar.prediction import Prediction
from autopar.strategy import Strategy
from tests.models import MODELS
from tests.planner.questions import question_of

GPT = MODELS["gpt"]
AUTO = Strategy(search=("pp", "tp"))
Mesh = tuple[int, int, int | None]


def mesh(strategy: Strategy) -> Mesh:
    return strategy.pipeline_ranks, strategy.tensor_ranks, strategy.micro_batches


def test_every_mesh_the_fewest_parts_first() -> None:
    found = [mesh(own)[:2] for own in meshes(AUTO, 4, near=4, blocks=3)]
    assert found == [(1, 1), (1, 2), (2, 1), (1, 4), (2, 2)]
    far = [mesh(own)[:2] for own in meshes(AUTO, 16, near=2, blocks=2)]
    assert far == [(1, 1), (1, 2), (2, 1), (2, 2)]
    fixed = [mesh(own)[:2] for own in meshes(replace(AUTO, tp=2), 8, near=8, blocks=8)]
    assert fixed == [(1, 2), (2, 2), (4, 2)]
    assert list(meshes(Strategy(), 4, 4, 3)) == [Strategy()]


def question(strategy: Strategy = AUTO, memory: int | None = None) -> Question:
    return question_of(GPT.make(), strategy, memory=memory)


def predicted(step_s: float, exposed_s: float, recompute: str = "none") -> Plan:
    cost = Prediction(
        step_s=step_s,
        update_s=0.0,
        compute_s=step_s - exposed_s,
        communication_s=exposed_s,
        exposed_s=exposed_s,
        peak_bytes=1,
        memory={},
    )
    levels = (("", recompute),)
    return replace(question().base(), recompute=levels, memory_cap=1, prediction=cost)  # type: ignore[arg-type]


Answers = Mapping[Mesh, Plan | Exception]


def looking(answers: Answers, seen: list[Mesh]) -> Callable[[Question], Plan]:
    def look(own: Question) -> Plan:
        assert not own.strategy.search
        seen.append(mesh(own.strategy))
        answer = answers[seen[-1]]
        if isinstance(answer, Exception):
            raise answer
        return replace(answer, name=str(seen[-1]))

    return look


def test_the_fastest_is_chosen_and_the_others_are_kept() -> None:
    answers: Answers = {
        (1, 1, None): predicted(2.0, 1.0),
        (1, 2, None): predicted(1.5, 0.5),
        (2, 1, None): predicted(1.2, 0.2),
        (1, 4, None): BatchError("odd rows"),
        (2, 2, None): predicted(1.4, 0.4),
    }
    beats: list[float] = []
    look = looking(answers, seen := [])

    def noting(own: Question) -> Plan:
        beats.append(own.beat_s)
        return look(own)

    plan = fastest_mesh(question(), noting, near=4)
    assert seen == list(answers)
    assert beats == [math.inf, 2.0, 1.5, 1.2, 1.2]
    assert plan.name == "(2, 1, None)"
    assert [other.name for other in plan.runners_up][:2] == ["(2, 2, None)", "(1, 2, None)"]
    assert plan.runners_up[0].why == "200.00 ms slower"
    assert plan.notes[-1] == "tp=4 is not possible: odd rows"


def test_what_computes_all_the_time_cannot_be_beaten() -> None:
    answers: Answers = {(1, 1, None): predicted(2.0, 0.5), (1, 2, None): predicted(1.5, 0.01)}
    plan = fastest_mesh(question(), looking(answers, seen := []), near=4)
    assert seen == list(answers)
    assert "not looked at: pp=2, tp=4, pp=2 x tp=2; 1% of the step" in plan.notes[-1]
    assert plan == fastest_mesh(question(), looking(answers, []), near=4)


def test_time_runs_out() -> None:
    answers: Answers = {(1, 1, None): predicted(2.0, 0.5)}
    plan = fastest_mesh(question(), looking(answers, []), near=4, go_on=lambda: False)
    assert "25% of the step is all that they could save" in plan.notes[-1]


def test_micro_batches_while_memory_presses() -> None:
    """Without stages they are rows that wait: less in memory, no less to compute."""
    answers: Answers = {
        (1, 1, None): OutOfMemoryError("", 7),
        (1, 1, 2): predicted(2.0, 0.5, "full"),
        (1, 1, 4): predicted(1.5, 0.01),
    }
    plan = fastest_mesh(question(memory=10**9), looking(answers, seen := []), near=4)
    assert seen == list(answers)
    assert plan.name == "(1, 1, 4)"


def test_states_that_exceed_the_cap_are_not_looked_at() -> None:
    """Whole states of 4 x 112,040 bytes fit in 120 kB only over four ranks."""
    given = question(replace(AUTO, zero=0), memory=120_000)
    answers: Answers = {(1, 4, None): predicted(2.0, 0.0)}
    assert fastest_mesh(given, looking(answers, []), near=4).name == "(1, 4, None)"
    with pytest.raises(OutOfMemoryError, match="tp=4: parameters, gradients and states alone"):
        fastest_mesh(replace(given, memory=50_000), looking({}, []), near=4)


def test_what_cannot_be_captured_at_all_is_said() -> None:
    with pytest.raises(CaptureError):
        fastest_mesh(question(), looking({(1, 1, None): CaptureError("if x > 0")}, []), near=4)
