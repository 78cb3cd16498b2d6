"""A pass that fails, in a module that a subprocess can import."""

from dataclasses import dataclass

from autopar.core.ir.graph import TrainingGraph
from autopar.passes.core.collective_ops import starts
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class BrokenPass(Pass):
    """Fails at the first collective, if it is to; changes the graph before."""

    fails: bool = True

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        first = next(starts(graph))
        first.meta["block"] = "broken"
        if self.fails:
            raise ZeroDivisionError(f"{first.name} cannot be divided")
        return PassResult(graph)
