"""`Measured`: a curve with its origin; `CurveKey`: its collective, groups and dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.cost_model.collectives import check_collective
from autopar.cost_model.cost import Cost, check_provenance
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.group_shape import GroupShape


@dataclass(frozen=True, order=True)
class CurveKey:
    """Key of a curve: a collective, the groups that ran it, and the dtype of the tensors."""

    collective: str
    shape: GroupShape
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_collective(self.collective)

    def __str__(self) -> str:
        return f"{self.collective} of {self.dtype} over {self.shape}"


@dataclass(frozen=True)
class Measured:
    """A curve with its origin.

    Attributes:
        curve: seconds over bytes.
        provenance: "measured WHEN on WHAT", "imported from SOURCE" or "modelled by FORMULA".
        version: version of the backend, such as "gloo, torch 2.13.0" or "nccl 2.18.1".
    """

    curve: Curve
    provenance: str
    version: str

    def __post_init__(self) -> None:
        check_provenance(self.provenance)

    def cost(self, nbytes: float) -> Cost:
        """The time of a message; modelled beyond the measured sizes."""
        origin = self.provenance
        if not self.curve.bytes[0] <= nbytes <= self.curve.bytes[-1]:
            span = f"{self.curve.bytes[0]} to {self.curve.bytes[-1]} bytes"
            origin = f"modelled beyond {span}, {origin}"
        return Cost(self.curve(nbytes), origin, self.curve.error(nbytes))


def curve_row(key: CurveKey, entry: Measured) -> dict[str, Any]:
    """One curve as a JSON-ready row."""
    return {
        "collective": key.collective,
        "ranks": key.shape.ranks,
        "ranks_per_node": key.shape.ranks_per_node,
        "groups": key.shape.groups,
        "dtype": key.dtype,
        "provenance": entry.provenance,
        "version": entry.version,
        **entry.curve.to_dict(),
    }
