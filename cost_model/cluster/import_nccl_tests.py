"""A `Cluster` from outputs of nccl-tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.core.common.notices import warn_once
from autopar.core.ir.messages import COLLECTIVES
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.interference import SHARED_GPU
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.nccl.nccl_tests import NcclTestsTable, read_tables
from autopar.cost_model.topology.devices import find_device
from autopar.errors import MeasurementWarning


def import_nccl_tests(
    paths: Sequence[str | Path],
    *,
    name: str | None = None,
    device: str | None = None,
    uniform: bool = False,
    **facts: Any,
) -> Cluster:
    """The cluster of some outputs of nccl-tests, one file for each run.

    Its name is by default that of the first file. `device` names the GPUs, and `facts` are
    arguments of `read_tables`, if the files lack these. `uniform` is as for `Cluster`.

    Raises:
        ClusterError: a file is truncated, foreign or contradicts itself; the message says where.
    """
    tables = [table for path in paths for table in read_tables(path, **facts)]
    if not tables:
        raise ClusterError("no files to import")
    title = name or Path(paths[0]).stem
    return cluster_of(tables, name=title, device=device, uniform=uniform)


def cluster_of(
    tables: Sequence[NcclTestsTable],
    *,
    name: str = "imported",
    device: str | None = None,
    uniform: bool = False,
) -> Cluster:
    """A cluster as large as the largest table; the arguments are as for `import_nccl_tests`."""
    curves: dict[CurveKey, Measured] = {}
    for table in tables:
        if table.collective not in COLLECTIVES:
            message = f"{table.source}: no plan issues {table.collective}, left out"
            warn_once(MeasurementWarning, message)
            continue
        if table.key in curves:
            raise ClusterError(f"{table.source}: there is another table of {table.key}")
        curves[table.key] = table.measured()
    if not curves:
        raise ClusterError("none of these tables is of a collective that plans issue")
    used = [table for table in tables if table.collective in COLLECTIVES]
    gpu = device or next((table.device for table in used if table.device), "unknown GPU")
    figures = find_device(gpu)
    sources = sorted({table.source for table in used})
    return Cluster(
        name=name,
        device=gpu,
        world_size=max(table.ranks for table in used),
        ranks_per_node=max(table.ranks_per_node for table in used),
        curves=curves,
        backend="nccl",
        versions={},
        provenance=f"imported from {sources[0]}"
        + (f" and {len(sources) - 1} more" if len(sources) > 1 else ""),
        slowdown=SHARED_GPU,
        uniform=uniform,
        figures=figures,
        device_memory_bytes=figures.memory_bytes if figures else None,
    )
