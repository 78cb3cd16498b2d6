"""The benchmark of random loops: its draws, its judgement, and a few loops."""

from dataclasses import replace
from datetime import date

import pytest
import torch

from benchmarks.loops.case import Answer, judge, run_case
from benchmarks.loops.draw import SETUPS, is_sound, recipe, train_plain
from benchmarks.loops.elements import ELEMENTS
from benchmarks.loops.loop import Observed, Recipe

SMALL = Recipe(3, "perceptron", "loss", "mean", "adamw", ("schedule",), (), (6, 6, 6), "ddp", 2)


def test_a_seed_draws_the_same_loops() -> None:
    assert recipe(7, 3) == recipe(7, 3)
    assert len({recipe(7, number).name for number in range(6)}) == 6
    assert train_plain(recipe(7, 3)).values == train_plain(recipe(7, 3)).values


@pytest.mark.parametrize("name", ELEMENTS)
def test_each_element_has_a_loop_that_trains(name: str) -> None:
    element = ELEMENTS[name]
    form = (element.forms or ("loss",))[0]
    alone = replace(SMALL, elements=(name,), traits=element.traits, form=form)
    assert is_sound(alone)
    assert train_plain(alone).values or name == "skipped"


def test_judgement() -> None:
    plain = Observed([1.0, 2.0], {"w": torch.ones(2)})
    other = Observed([1.0, 2.1], {"w": torch.ones(2)})
    assert judge([Answer(plain)] * 2, plain)["outcome"] == "exact"
    assert judge([Answer(plain), Answer(other)], plain)["outcome"] == "silent"
    assert judge([Answer(other, warned=("differs",))], plain)["outcome"] == "told"
    assert judge([Answer(refusal="StrategyError: no")] * 2, plain)["outcome"] == "told"
    assert judge([Answer(refusal="StrategyError: no"), Answer(plain)], plain)["outcome"] == "raw"
    assert judge([Answer(refusal="CommunicationError: gone")], plain)["outcome"] == "raw"
    assert judge([Answer(raw="ValueError: no"), Answer(plain)], plain)["outcome"] == "raw"
    stage = Observed([1.0, 2.0], {})
    assert judge([Answer(stage)], plain)["outcome"] == "silent"


@pytest.mark.slow
@pytest.mark.parametrize("setup", ["ddp", "zero3"])
def test_a_loop_beside_one_process(setup: str) -> None:
    assert setup in SETUPS
    elements = ("no_sync", "clip_norm", "evaluate_between", "input_gradient")
    case = run_case(0, replace(SMALL, elements=elements, setup=setup))
    assert case.outcome == "exact", case


MENDED = {
    "derivative of a step": ("losses", "ddp-local", ("curvature_of_parameters",)),
    "hooks of one loss": ("losses", "ddp", ("both_in_turn", "norm_hook")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MENDED)
def test_loops_that_failed_once(name: str) -> None:
    form, setup, elements = MENDED[name]
    case = run_case(
        0, replace(SMALL, form=form, setup=setup, elements=elements, ranks=3, rows=(12, 12))
    )
    assert case.outcome == "exact", case


@pytest.mark.slow
@pytest.mark.parametrize("number", range(6))
def test_loops_that_nobody_has_seen(number: int) -> None:
    """Draws of today: whatever day a fault shows, its recipe is in the failure."""
    seed = date.today().toordinal()
    case = run_case(number, recipe(seed, number))
    assert case.outcome in ("exact", "told"), (seed, case)
