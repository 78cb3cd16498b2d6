"""`OpStrategy`: placements of an operator's operands and results along one axis."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.placement import Placement


@dataclass(frozen=True)
class OpStrategy:
    """One way to compute an operator along an axis.

    Attributes:
        operands: where each tensor among the arguments must lie.
        results: where each result then lies.
        own: the lowering that does it (`own.OWN`), "" if the operator is run on shards.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    lowering: str = ""

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"
        return f"{text} by {self.lowering}" if self.lowering else text
