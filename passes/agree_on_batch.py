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
    """Adds up evidence of what each rank of a model was given.

    Before: the graph of ranks that are to be given the same rows. After: it takes `Evidence` of
    the axes and returns the `Verdict`, summed along one after the other by the first collectives
    of the forward: all these ranks find the same. Tier: exact.

    Attributes:
        axes: the mesh axes that the model is partitioned along.
    """

    axes: tuple[str, ...]
    tier: ClassVar[Literal["exact", "lossy"]] = "exact"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        """Applies the pass to a copy of `graph`."""
        graph = graph.copy()
        first = next(graph.calls(), None)
        if first is None:
            return PassResult(graph, "nothing is computed")
        fake = fake_like(graph, (EVIDENCE_SIZE,), torch.float64)
        name = "_".join(self.axes)
        graph, total = add_input(graph, Evidence(name), f"evidence_{name}", fake)
        total.meta |= {"phase": "forward", "rows": ((),)}
        graph.graph.inserting_before(first)
        for axis in self.axes:
            (total,) = collective(graph.graph, first, start_all_reduce, [total], axis)
            for node in (total.args[0].args[0], total.args[0], total):  # type: ignore[union-attr]
                node.meta |= {"phase": "forward", "rows": ((),)}  # type: ignore[union-attr]
        return PassResult(graph.with_results({Verdict(name): total}))
