"""`SearchProgress`: what a search over meshes is doing. `TooCostlyError`: it lacks the time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.formatting import duration


class TooCostlyError(AutoparError):
    """A mesh takes longer to lower than the time that is left."""


@dataclass(frozen=True)
class SearchProgress:
    """Progress of a search.

    Attributes:
        done: number of meshes before it.
        best_s: predicted step time of the best plan so far in seconds, 0 if there is none.
    """

    mesh: str
    done: int
    total: int
    best_s: float

    def __str__(self) -> str:
        best = f", best {duration(self.best_s)}" if self.best_s else ""
        return f"planning {self.mesh}{best}"


ReportProgress = Callable[[SearchProgress], None]
