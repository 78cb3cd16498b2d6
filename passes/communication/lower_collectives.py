"""`LowerCollectives`: abstract collectives lowered to torch's functional collectives.

Functional collectives have copies and views around them, which every merge and move would have to
rewrite. So they are written last, in the form that is fastest on the backend.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.core.ir.graph import GraphProperty, TrainingGraph, tensors
from autopar.core.ir.mesh_levels import axis_of_level, coordinate_on
from autopar.errors import StrategyError
from autopar.passes.communication.lower_functional import Lowering
from autopar.passes.communication.lower_gloo import GlooLowering
from autopar.passes.core.collective_ops import axis_of, kind_of, starts
from autopar.passes.core.pass_base import Pass, PassResult


def emitted(kind: str, backend: str) -> str:
    """The kind of collective that a kind is lowered to on a backend; messages keep their size."""
    exchanged = backend == "gloo" and kind in ("all_gather", "reduce_scatter")
    return "all_to_all" if exchanged or kind == "permute" else kind


@dataclass(frozen=True)
class LowerCollectives(Pass):
    """Lowers each collective to copies into a buffer, a functional collective, and views.

    Before: abstract collectives. After: functional collectives, which name their axis as the group
    and are awaited once. Chunks are padded to equal size. On gloo, gathers and reduce-scatters are
    all-to-alls (see `lower_gloo`), but those of complex numbers. Tier: exact.

    Attributes:
        backend: "gloo", "nccl" or another torch.distributed backend.
        rank: this rank's coordinate on the axis.
        axis: axis to lower, with its levels; "" lowers every collective of a graph with one axis.
    """

    backend: str
    rank: int
    axis: str = ""
    ensures = frozenset({GraphProperty.COLLECTIVES_LOWERED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        pending = [s for s in starts(graph) if self.axis in ("", axis_of_level(axis_of(s)))]
        if not pending:
            return PassResult(graph, "there is no collective")
        for start in pending:
            is_native = self.backend != "gloo" or _sends_complex(start)
            place = coordinate_on(axis_of(start), self.rank, graph.axes)
            (Lowering if is_native else GlooLowering)(graph, start, place).run()
        return PassResult(graph)


def _sends_complex(start: fx.Node) -> bool:
    """Whether gloo sends complex numbers, which it has no all-to-all of.

    Raises:
        StrategyError: it would, by an all-to-all.
    """
    if not any(tensor.is_complex() for tensor in tensors(start)):
        return False
    if kind_of(start) in ("all_to_all", "permute"):
        raise StrategyError(
            f"{start.name} would send complex numbers, and gloo has no all-to-all of them: keep "
            "the real and imaginary parts apart (torch.view_as_real), or choose a strategy that "
            "leaves these rows and parameters whole."
        )
    return True
