"""`Work`: rows, tokens and FLOPs of a step, for throughput and hardware utilisation."""

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
    """Work of one step of all ranks.

    Attributes:
        rows: rows of the global batch.
        tokens: elements of the first two-dimensional integer input; 0 without one.
        flops: floating-point operations of matrix products, convolutions and attention, forward
            and backward, without recomputation; causal attention counts like full attention.
        peak: peak FLOP/s of one rank's device; 0 if unknown.
        dtype: dtype of the products.
    """

    rows: Count
    tokens: Count
    flops: Amount
    peak: Amount
    dtype: str

    @staticmethod
    def of(graph: TrainingGraph, parts: int, cluster: Cluster, dtype: str) -> Work:
        """The work of a captured graph.

        Args:
            graph: graph of one micro-batch of a data-parallel rank, before partitioning.
            parts: number of such micro-batches in a step of all ranks.
            cluster: cluster of the device.
            dtype: dtype of the products, such as "bfloat16".
        """
        flops = sum(flops_of(node) for node in graph.calls())
        device = cluster.figures or find_device(cluster.device)
        peak = device.flops_per_s.get(dtype, 0.0) if device is not None else 0.0
        pairs = zip(graph.inputs, graph.placeholders, strict=True)
        given = [tensors(node)[0] for role, node in pairs if isinstance(role, Input)]
        rows = next((v.shape[0] for v in given if v.dim()), 0)
        whole = (v for v in given if v.dim() == 2 and not v.dtype.is_floating_point)
        tokens = next((v.numel() for v in whole), 0)
        return Work(rows * parts, tokens * parts, flops * parts, peak, dtype)

    def utilisation(self, step_s: float, ranks: int) -> float:
        """Fraction of the peak FLOP/s of all ranks; 0 if unknown."""
        return self.flops / (step_s * ranks * self.peak) if self.peak and step_s else 0.0
