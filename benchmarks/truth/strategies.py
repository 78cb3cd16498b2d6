"""Strategies that leave nothing to choose, so that nothing is measured."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import autopar

FIXED = {"recompute": "none", "gather_bytes": 1 << 14, "reduce_bytes": 1 << 14, "prefetch": 1}


@dataclass(frozen=True)
class Setup:
    """A strategy and the worlds that it suits.

    Attributes:
        options: fields of `autopar.Strategy`.
        ranks: world sizes.
        micro_batches: number of equal parts that the rows of all ranks together are cut into.
    """

    options: dict[str, Any]
    ranks: tuple[int, ...] = (2, 3)
    micro_batches: int = 1

    def multiple(self, ranks: int) -> int:
        """The number that the number of rows must be a multiple of."""
        if self.micro_batches == 1:
            return 1
        return self.micro_batches * (1 if "pp" in self.options else ranks)

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
}
"""Name -> setup; "x2" stands for two micro-batches."""


def setups_of(seed: int, number: int) -> list[tuple[str, int]]:
    """ddp and two more setups for a model, each with a number of ranks."""
    rng = random.Random(f"{seed}/{number}/setups")
    names = ["ddp", *sorted(rng.sample([name for name in SETUPS if name != "ddp"], 2))]
    return [(name, rng.choice(SETUPS[name].ranks)) for name in names]
