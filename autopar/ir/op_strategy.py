"""`OpStrategy`: placements of an operator's operands and results along one axis."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.placement import Placement


@dataclass(frozen=True)
class OpStrategy:
    """Placements of one operator along an axis.

    Attributes:
        operands: required placement of each tensor argument.
        results: placement of each result.
        lowering: name in `CUSTOM_LOWERINGS`, or "" to run the operator on local shards.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    lowering: str = ""

    def __str__(self) -> str:
        text = f"{', '.join(map(str, self.operands))} -> {', '.join(map(str, self.results))}"
        return f"{text} by {self.lowering}" if self.lowering else text
