"""Strategies under which models train; they leave nothing to choose, so nothing is measured."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Literal

import autopar
from benchmarks.truth.inputs import ROW_NUMBERS
from benchmarks.truth.recipe import Recipe

FIXED = {"recompute": "none", "gather_bytes": 1 << 14, "reduce_bytes": 1 << 14, "prefetch": 1}


@dataclass(frozen=True)
class Setup:
    """Fields of a strategy, possible world sizes, and whether each rank brings its own rows."""

    options: dict[str, Any]
    ranks: tuple[int, ...] = (2, 3)
    batch: Literal["global", "local"] = "global"

    @property
    def is_local(self) -> bool:
        return self.batch == "local"

    def suits(self, recipe: Recipe) -> bool:
        """Whether the rows can be divided before the call: no input numbers rows."""
        return not (self.is_local and ROW_NUMBERS & set(recipe.inputs))

    def fit(self, recipe: Recipe, ranks: int) -> Recipe:
        """Return the recipe with rows that divide into ranks and micro-batches."""
        micro_batches = self.options.get("micro_batches", 1)
        shares = 1 if "pp" in self.options else ranks
        multiple = shares * micro_batches if micro_batches > 1 or self.is_local else 1
        return replace(recipe, rows=recipe.rows + -recipe.rows % lcm(recipe.divides, multiple))

    def strategy(self) -> autopar.Strategy:
        return autopar.Strategy(**{**FIXED, **self.options})


_PIPELINE = {"zero": 0, "pp": 2, "schedule": "1f1b"}
SETUPS = {
    "ddp": Setup({"zero": 0}),
    "zero3": Setup({"zero": 3}),
    "tp2": Setup({"zero": 0, "tp": 2}, (2,)),
    "cp2": Setup({"zero": 0, "cp": 2}, (2,)),
    "pp2": Setup({**_PIPELINE, "micro_batches": 1}, (2,)),
    "pp2x2": Setup({**_PIPELINE, "micro_batches": 2}, (2,)),
    "ddpx2": Setup({"zero": 0, "micro_batches": 2}),
    "ddp-local": Setup({"zero": 0}, batch="local"),
    "zero3-local": Setup({"zero": 3}, batch="local"),
}
"""Name -> setup; "x2" means two micro-batches."""

DRAWN = ("zero3", "tp2", "cp2", "pp2", "pp2x2", "ddpx2")
"""Setups of which each model trains under two random ones."""


def setups_of(seed: int, number: int) -> list[tuple[str, int]]:
    """Return ddp and two more setups for a model, each with a number of ranks."""
    rng = random.Random(f"{seed}/{number}/setups")
    names = ["ddp", *sorted(rng.sample(DRAWN, 2))]
    return [(name, rng.choice(SETUPS[name].ranks)) for name in names]
