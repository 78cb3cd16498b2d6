"""What a step amounts to, so that its time says how well machines are used."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.common.documents import Amount, Count
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.topology.devices import find_device
from autopar.ir.graph import TrainingGraph, tensors
from autopar.ir.roles import Input


@dataclass(frozen=True)
class Work:
    """One step of all ranks together.

    Attributes:
        rows: of the global batch.
        tokens: integers in the first input that has them in rows; 0 if none has.
        flops: floating-point operations of matrix products, convolutions and attention, forward and
            backward, each once however often a plan computes it again; attention counts in full.
        peak: what one rank's device could do of them in a second, 0 if that is not known.
        dtype: of these.
    """

    rows: Count
    tokens: Count
    flops: Amount
    peak: Amount
    dtype: str

    @staticmethod
    def of(graph: TrainingGraph, parts: int, cluster: Cluster, dtype: str) -> Work:
        """Of a captured graph.

        Args:
            graph: of a micro-batch of one data-parallel rank, before it is partitioned.
            parts: how many such parts make the step.
            cluster: names the device.
            dtype: in which products are computed, such as "bfloat16".
        """
        flops = sum(flops_of(node) for node in graph.calls())
        device = cluster.figures or find_device(cluster.device)
        peak = device.flops_per_s.get(dtype, 0.0) if device is not None else 0.0
        rows, tokens = _shared(graph)
        return Work(rows * parts, tokens * parts, flops * parts, peak, dtype)

    def utilisation(self, step_s: float, ranks: int) -> float:
        """The part of the peak of all ranks that a step of so many seconds is; 0 if unknown."""
        return self.flops / (step_s * ranks * self.peak) if self.peak and step_s else 0.0


def _shared(graph: TrainingGraph) -> tuple[int, int]:
    """Rows of the first input that has any, and integers of the first that has rows of them."""
    pairs = zip(graph.inputs, graph.placeholders, strict=True)
    given = [tensors(node)[0] for role, node in pairs if isinstance(role, Input)]
    rows = [value.shape[0] for value in given if value.dim()]
    tokens = [v.numel() for v in given if v.dim() == 2 and not v.dtype.is_floating_point]
    return next(iter(rows), 0), next(iter(tokens), 0)
