"""Verdicts of the benchmark of faults, from events alone."""

from typing import Any

from benchmarks.faults.injection import schedule
from benchmarks.faults.runs import burnt, effects, wrong_losses


def event(kind: str, time: float, attempt: str, **values: Any) -> dict[str, Any]:
    return {"event": kind, "rank": 0, "ranks": 2, "time": time, "attempt": attempt, **values}


EVENTS = [
    event("start", 0, "a"),
    event("step", 2, "a", step=7, loss=1.0),
    event("fault", 2.5, "a", fault="kill", phase="step"),
    event("step", 2.6, "a", step=8, loss=0.5),  # of a rank that was not struck
    event("start", 3, "b"),
    event("resumed", 5, "b", step=4),
    event("step", 6, "b", step=5, loss=2.0),
]


def test_effects_of_a_fault() -> None:
    [effect] = effects(EVENTS)
    assert effect == {"fault": "kill", "phase": "step", "seconds": 3.5, "lost_steps": 3}


def test_attempts_that_end_without_a_fault_are_burnt() -> None:
    assert burnt(EVENTS, launches=1) == 0
    assert burnt([*EVENTS, event("start", 7, "c")], launches=1) == 1


def test_losses_are_compared_step_by_step() -> None:
    losses = [1.0] * 4 + [2.0, 1.0, 1.0, 0.5]
    assert wrong_losses(EVENTS, losses) == []
    assert wrong_losses(EVENTS, [*losses[:4], 2.1, *losses[5:]]) == [5]


def test_a_schedule_repeats() -> None:
    made = [schedule("kill", ["load", "step"], 5, 4, 2, seed) for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]
    assert [(each.id, each.phase, each.step) for each in made[0]] == [
        (2, "load", 0),
        (3, "step", 5),
    ]
