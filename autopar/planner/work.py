"""`work_of`: the work of one step, counted from a captured graph."""

from __future__ import annotations

import torch

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import Input
from autopar.core.plan.prediction import NARROW, Work
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.topology.devices import find_device


def work_of(graph: TrainingGraph, parts: int, cluster: Cluster, dtype: str) -> Work:
    """The work of a captured graph.

    Args:
        graph: graph of one micro-batch of a data-parallel rank, before partitioning.
        parts: number of such micro-batches in a step of all ranks.
        cluster: cluster of the device.
        dtype: dtype of the products, such as "bfloat16".
    """
    flops = wide_flops = 0.0
    for node in graph.calls():
        if done := flops_of(node):
            flops += done
            is_wide = dtype in NARROW and tensors(node)[0].dtype == torch.float32
            wide_flops += done if is_wide else 0.0
    device = cluster.figures or find_device(cluster.device)
    rates = device.flops_per_s if device is not None else {}
    pairs = zip(graph.inputs, graph.placeholders, strict=True)
    inputs = [tensors(node)[0] for role, node in pairs if isinstance(role, Input)]
    rows = next((v.shape[0] for v in inputs if v.dim()), 0)
    sequences = (v for v in inputs if v.dim() == 2 and not v.dtype.is_floating_point)
    tokens = next((v.numel() for v in sequences), 0)
    return Work(
        rows=rows * parts,
        tokens=tokens * parts,
        flops=flops * parts,
        peak=rates.get(dtype, 0.0),
        dtype=dtype,
        wide_flops=wide_flops * parts,
        wide_peak=rates.get("float32", 0.0),
    )
