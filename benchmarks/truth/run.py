"""The sweep: every model under each of its setups."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import lcm

from benchmarks.truth.draw import plain
from benchmarks.truth.model import Recipe
from benchmarks.truth.outcome import Case, judged
from benchmarks.truth.strategies import SETUPS
from benchmarks.truth.worker import answer
from tests.harness.worlds import RankError, run

PATIENCE = 150.0
"""Seconds that one case may take."""


def suited(recipe: Recipe, setup: str, ranks: int) -> Recipe:
    """The model with a number of rows that the setup can divide into micro-batches."""
    multiple = lcm(recipe.multiple, SETUPS[setup].multiple(ranks))
    return replace(recipe, rows=recipe.rows + -recipe.rows % multiple)


def case(number: int, recipe: Recipe, setup: str, ranks: int) -> Case:
    """Train one model under one setup on processes that stay alive for the next."""
    recipe = suited(recipe, setup, ranks)
    begun = time.monotonic()
    try:
        answers = run(answer, ranks, timeout=PATIENCE, recipe=recipe, setup=setup)
        found = judged(answers, plain(recipe))
    except RankError as error:
        found = {"outcome": "crash", "said": (_ended(error),)}
    seconds = round(time.monotonic() - begun, 2)
    return Case(number, recipe.name, setup, ranks, asdict(recipe), seconds=seconds, **found)


def cases(
    models: Iterator[tuple[int, Recipe, Sequence[tuple[str, int]]]],
) -> Iterator[Case]:
    """All cases in turn."""
    for number, recipe, setups in models:
        for setup, ranks in setups:
            if not SETUPS[setup].suits(recipe):
                continue
            yield case(number, recipe, setup, ranks)


def _ended(error: RankError) -> str:
    """How each rank ended, and the stacks of those that hung."""
    first = "; ".join(f"rank {r}: {text.splitlines()[0]}" for r, text in error.errors.items())
    return f"{first}\n{str(error)[-4000:]}"
