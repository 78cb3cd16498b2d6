"""Part `curves`: tables of nccl-tests, with sizes held out, and groups of twice the ranks or nodes.

Held out: each half of a table, every other size, is predicted from the other half. The error of a
table is the mean over its sizes of |predicted / measured - 1|.

Other groups: among tables that differ in ranks or nodes only, those of the smaller groups make a
cluster. It predicts the next group of twice the nodes, or on one node twice the ranks.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cluster.import_nccl_tests import cluster_of
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.nccl.nccl_tests import NcclTestsTable, read_tables
from autopar.cost_model.topology.topology import repeated
from benchmarks.prediction.report import case, summary

Case = dict[str, Any]
_SUFFIXES = (".csv", ".txt", ".log", ".out", ".json")
_SHAPE = re.compile(r"(\d+)x(\d+)|(?<![a-z0-9])(n\d+|\d+(gpus?|ranks?|nodes?))(?![a-z0-9])")
_DEVICE = re.compile(r"[abhv]\d00|rtx ?\d+", re.IGNORECASE)
_MACHINES = {"A100": "dgx-a100", "H100": "dgx-h100"}
_ON_SWITCHES = ("A100", "H100", "H200", "B200", "B300")
"""GPUs behind NVSwitches, where all subsets of a node have equal links."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return errors of held-out sizes, and of other groups under `other_groups`."""
    tables, refused = load(options.tables)
    by_table = {name: list(held_out(name, table)) for name, table in tables.items()}
    errors = {name: mean(case["error"] for case in cases) for name, cases in by_table.items()}
    cases = [case for each in by_table.values() for case in each]
    return {
        "median_error": median(errors.values()),
        "worst_error": max(errors.values()),
        "median_of_sizes": median(case["error"] for case in cases),
        "within_error_bar": mean(case["error"] <= case["error_bar"] for case in cases),
        "tables": errors,
        "cases": cases,
        "refused": refused,
        "other_groups": other_groups(tables),
    }


def load(folder: Path) -> tuple[dict[str, NcclTestsTable], list[str]]:
    """Return the tables in a folder by file name, and errors of unreadable ones.

    A name such as a100_2x8_allreduce has the ranks of a node, where the file does not.
    """
    if not folder.is_dir():
        raise ClusterError(f"{folder} is no folder: give the tables with --tables DIR")
    tables: dict[str, NcclTestsTable] = {}
    refused: list[str] = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        match = _SHAPE.search(path.stem)
        ranks_per_node = int(match[2]) if match and match[2] else None
        try:
            found = read_tables(path, ranks_per_node=ranks_per_node)
        except ClusterError as error:
            refused.append(str(error))
            continue
        for index, table in enumerate(found):
            tables[f"{path.stem}{f'#{index + 1}' if index else ''}"] = table
    if not tables:
        raise ClusterError(f"{folder} holds no tables. {'; '.join(refused)}")
    return tables, refused


def held_out(name: str, table: NcclTestsTable) -> Iterator[Case]:
    """Yield a case for every usable size, predicted from every other one."""
    sizes = [table.bytes[i] for i in table.usable]
    seconds = [table.seconds[i] for i in table.usable]
    spread = [abs(table.seconds[i] - table.in_place_s[i]) for i in table.usable]
    for first in (0, 1):
        known = slice(first, None, 2)
        curve = Curve.smooth(sizes[known], seconds[known], spread[known])
        for size, measured in list(zip(sizes, seconds, strict=True))[1 - first :: 2]:
            yield case(name, curve(size), measured, bytes=size, error_bar=curve.error(size))


def other_groups(tables: dict[str, NcclTestsTable]) -> dict[str, Any]:
    """Return errors for tables of twice the nodes or ranks of other tables."""
    cases: list[Case] = []
    refused: list[str] = []
    for name, target, smaller in doublings(tables):
        try:
            cases += doubled(name, target, _cluster(name, target, smaller))
        except ClusterError as error:
            refused.append(f"{name}: {error}")
    return {**summary(cases), "refused": refused}


def doublings(
    tables: dict[str, NcclTestsTable],
) -> Iterator[tuple[str, NcclTestsTable, Sequence[NcclTestsTable]]]:
    """Yield each table that has one of half its nodes, or of half the ranks of its one node.

    With it come all tables of the same machines and collective, up to that half.
    """
    for name, target in tables.items():
        half = target.ranks // 2
        family: dict[CurveKey, NcclTestsTable] = {}
        for other, table in tables.items():
            if table.ranks <= half and _same_machines(name, target, other, table):
                family.setdefault(table.key, table)
        nearest = [table for table in family.values() if table.ranks == half and half >= 4]
        if any(_nodes(t) == 1 == _nodes(target) or _nodes(t) >= 2 for t in nearest):
            yield name, target, list(family.values())


def doubled(name: str, target: NcclTestsTable, cluster: Cluster) -> Iterator[Case]:
    """Yield a case for every usable size, predicted by a cluster of smaller groups."""
    key = target.key
    for i in target.usable:
        size = target.bytes[i]
        cost = cluster.seconds(key.collective, size, key.shape, key.dtype)
        yield case(name, cost.seconds, target.seconds[i], bytes=size, error_bar=cost.error)


def _cluster(name: str, target: NcclTestsTable, smaller: Sequence[NcclTestsTable]) -> Cluster:
    """The cluster of the smaller tables, with the topology of a known machine."""
    match = _DEVICE.search(f"{target.hardware} {name}")
    device = match[0].upper() if match else "unknown GPU"
    made = cluster_of(smaller, device=device, uniform=device in _ON_SWITCHES)
    if device not in _MACHINES:
        return made
    topology = Cluster.named(_MACHINES[device]).topology
    return replace(made, topology=repeated(topology, _nodes(target)))


def _nodes(table: NcclTestsTable) -> int:
    return table.ranks // table.ranks_per_node


def _same_machines(name: str, table: NcclTestsTable, other: str, candidate: NcclTestsTable) -> bool:
    """Whether two tables are of one kind of machine, by their names or headers."""
    if (table.collective, table.dtype) != (candidate.collective, candidate.dtype):
        return False
    same_name = _SHAPE.sub("", name) == _SHAPE.sub("", other)
    return same_name or (table.hardware != "" and _kind(table) == _kind(candidate))


def _kind(table: NcclTestsTable) -> str:
    return re.sub(r"^\d+x\s*|\(.*?\)|\s+", "", table.hardware).lower()
