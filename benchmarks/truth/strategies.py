"""Strategies that leave nothing to choose, so that nothing is measured."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

import autopar
from benchmarks.truth.model import Recipe

FIXED = {"recompute": "none", "gather_bytes": 1 << 14, "reduce_bytes": 1 << 14, "prefetch": 1}


@dataclass(frozen=True)
class Setup:
    """A strategy and the worlds that it suits.

    Attributes:
        options: fields of `autopar.Strategy`.
        ranks: world sizes.
        micro_batches: number of equal parts that the rows of all ranks together are cut into.
        batch: "global", or "local" where each rank brings its own rows.
    """

    options: dict[str, Any]
    ranks: tuple[int, ...] = (2, 3)
    micro_batches: int = 1
    batch: Literal["global", "local"] = "global"

    def multiple(self, ranks: int) -> int:
        """The number that the number of rows must be a multiple of."""
        shares = 1 if "pp" in self.options else ranks
        return shares * self.micro_batches if self.micro_batches > 1 or self.is_local else 1

    def suits(self, recipe: Recipe) -> bool:
        """Whether rows can be cut before they are given: no input numbers those of the batch."""
        return not (self.is_local and {"permutation", "edges", "pair_mask"} & set(recipe.inputs))

    @property
    def is_local(self) -> bool:
        """Whether each rank brings its own rows."""
        return self.batch == "local"

    def strategy(self) -> autopar.Strategy:
        """The strategy."""
        return autopar.Strategy(**{**FIXED, **self.options})


SETUPS = {
    "ddp": Setup({"zero": 0}),
    "zero3": Setup({"zero": 3}),
    "tp2": Setup({"zero": 0, "tp": 2}, (2,)),
    "cp2": Setup({"zero": 0, "cp": 2}, (2,)),
    "pp2": Setup({"zero": 0, "pp": 2, "micro_batches": 1, "schedule": "1f1b"}, (2,)),
    "pp2x2": Setup({"zero": 0, "pp": 2, "micro_batches": 2, "schedule": "1f1b"}, (2,), 2),
    "ddpx2": Setup({"zero": 0, "micro_batches": 2}, micro_batches=2),
    "ddp-local": Setup({"zero": 0}, batch="local"),
    "zero3-local": Setup({"zero": 3}, batch="local"),
}
"""Name -> setup; "x2" stands for two micro-batches."""

DRAWN = ("zero3", "tp2", "cp2", "pp2", "pp2x2", "ddpx2")
"""Setups of which each model is given two at random."""


def setups_of(seed: int, number: int) -> list[tuple[str, int]]:
    """ddp and two more setups for a model, each with a number of ranks."""
    rng = random.Random(f"{seed}/{number}/setups")
    names = ["ddp", *sorted(rng.sample(DRAWN, 2))]
    return [(name, rng.choice(SETUPS[name].ranks)) for name in names]
