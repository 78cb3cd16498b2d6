"""Ranks that share a model find out whether they were given the same rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from autopar.graph import Evidence, TrainingGraph, Verdict
from autopar.passes.base import PassResult
from autopar.passes.build import add_input, fake_like
from autopar.passes.collectives import collective, start_all_reduce

EVIDENCE_SIZE = 4


@dataclass(frozen=True)
class AgreeOnBatch:
    """Adds up evidence of what each rank of an axis was given.

    Before: the graph of ranks that are to be given the same rows. After: it takes `Evidence` of
    the axis and returns the `Verdict`, the first collective of the forward. Tier: exact.

    Attributes:
        axis: the mesh axis.
    """

    axis: str
    tier: ClassVar[Literal["exact", "lossy"]] = "exact"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        graph = graph.copy()
        first = next(graph.calls(), None)
        if first is None:
            return PassResult(graph, "nothing is computed")
        fake = fake_like(graph, (EVIDENCE_SIZE,), torch.float64)
        graph, evidence = add_input(graph, Evidence(self.axis), f"evidence_{self.axis}", fake)
        graph.graph.inserting_before(first)
        (verdict,) = collective(graph.graph, first, start_all_reduce, [evidence], self.axis)
        for node in (evidence, verdict.args[0].args[0], verdict.args[0], verdict):  # type: ignore
            node.meta |= {"phase": "forward", "rows": ((),)}  # type: ignore[union-attr]
        return PassResult(graph.with_results({Verdict(self.axis): verdict}))
