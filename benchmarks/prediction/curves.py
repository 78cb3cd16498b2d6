"""Part curves: tables of nccl-tests, sizes held out, and groups of twice the ranks or nodes.

Held out: each table is cut in two, every other size, and either half is predicted from the other,
so that each size is predicted once, those at the ends by extrapolation. A table's error is the mean
over its sizes of |predicted / measured - 1|; `median_error` is the median of the tables. Sizes that
a table's own header declares unusable are left out; nothing else is.

Other groups: of tables that differ in ranks or nodes only, those of the smaller groups make a
cluster, which predicts the next larger one of twice the nodes, or on one node twice the ranks.
Gloo groups measured here are predicted likewise (`benchmarks.prediction.gloo`).
"""

from __future__ import annotations

import argparse
import importlib
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
from benchmarks.prediction.report import summary

Case = dict[str, Any]
_SUFFIXES = (".csv", ".txt", ".log", ".out", ".json")
_SHAPE = re.compile(r"(\d+)x(\d+)|(?<![a-z0-9])(n\d+|\d+(gpus?|ranks?|nodes?))(?![a-z0-9])")
_DEVICE = re.compile(r"[abhv]\d00|rtx ?\d+", re.IGNORECASE)
_MACHINES = {"A100": "dgx-a100", "H100": "dgx-h100"}
_ON_SWITCHES = ("A100", "H100", "H200", "B200", "B300")
"""Behind NVSwitches all subsets of a node are alike; on a mesh of NVLinks, or on PCIe, not."""


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The part's result; the predictions for other groups are under `other_groups`."""
    tables, refused = load(options.tables)
    cases = [case for name, table in tables.items() for case in held_out(name, table)]
    by_table: dict[str, list[Case]] = {}
    for case in cases:
        by_table.setdefault(case["group"], []).append(case)
    errors = {name: mean(case["error"] for case in own) for name, own in by_table.items()}
    return {
        "median_error": median(errors.values()),
        "worst_error": max(errors.values()),
        "median_of_sizes": median(case["error"] for case in cases),
        "within_error_bar": mean(case["error"] <= case["error_bar"] for case in cases),
        "tables": errors,
        "cases": cases,
        "refused": refused,
        "other_groups": other_groups(tables),
        "gloo_groups": gloo_groups(options),
    }


def load(folder: Path) -> tuple[dict[str, NcclTestsTable], list[str]]:
    """The tables in a folder by the names of their files, and why others were refused.

    A name such as a100_2x8_allreduce tells the ranks on a node, where the file does not.
    """
    if not folder.is_dir():
        raise ClusterError(f"{folder} is no folder: give the tables with --tables DIR")
    tables: dict[str, NcclTestsTable] = {}
    refused: list[str] = []
    for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        match = _SHAPE.search(path.stem)
        each = int(match[2]) if match and match[2] else None
        try:
            found = read_tables(path, ranks_per_node=each)
        except ClusterError as error:
            refused.append(str(error))
            continue
        for index, table in enumerate(found):
            tables[f"{path.stem}{f'#{index + 1}' if index else ''}"] = table
    if not tables:
        raise ClusterError(f"{folder} holds no tables. {'; '.join(refused)}")
    return tables, refused


def held_out(name: str, table: NcclTestsTable) -> Iterator[Case]:
    """Every usable size of a table, predicted from every other one."""
    sizes = [table.bytes[i] for i in table.usable]
    seconds = [table.seconds[i] for i in table.usable]
    spread = [abs(table.seconds[i] - table.in_place_s[i]) for i in table.usable]
    for first in (0, 1):
        known = slice(first, None, 2)
        curve = Curve.smooth(sizes[known], seconds[known], spread[known])
        for size, measured in list(zip(sizes, seconds, strict=True))[1 - first :: 2]:
            yield _case(name, size, curve(size), measured, curve.error(size))


def _case(group: str, size: int, predicted: float, measured: float, bar: float) -> Case:
    return {
        "group": group,
        "bytes": size,
        "predicted": predicted,
        "measured": measured,
        "error": abs(predicted / measured - 1),
        "error_bar": bar,
    }


def other_groups(tables: dict[str, NcclTestsTable]) -> dict[str, Any]:
    """Predictions for tables of twice the nodes or ranks of other tables."""
    cases: list[Case] = []
    refused: list[str] = []
    for name, target, smaller in doublings(tables):
        try:
            cases += doubled(name, target, _cluster(_device(name, target), target, smaller))
        except ClusterError as error:
            refused.append(f"{name}: {error}")
    return {**summary(cases), "refused": refused}


def _cluster(device: str, target: NcclTestsTable, smaller: Sequence[NcclTestsTable]) -> Cluster:
    """What the smaller tables and the kind of machine tell."""
    made = cluster_of(smaller, device=device, uniform=device in _ON_SWITCHES)
    if device not in _MACHINES:
        return made
    return replace(
        made, topology=repeated(Cluster.named(_MACHINES[device]).topology, _nodes(target))
    )


def gloo_groups(options: argparse.Namespace) -> dict[str, Any] | None:
    """The same of gloo groups that are measured here; None if nothing can measure them."""
    name = "benchmarks.prediction.gloo"
    try:
        outcome: dict[str, Any] = importlib.import_module(name).run(options)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
    return outcome


def doublings(
    tables: dict[str, NcclTestsTable],
) -> Iterator[tuple[str, NcclTestsTable, Sequence[NcclTestsTable]]]:
    """Each table for which there is one of half the nodes, or half the ranks of its one node.

    With it come all tables of the same machines and collective that are no larger than that half.
    """
    for name, target in tables.items():
        half = target.ranks // 2
        family: dict[CurveKey, NcclTestsTable] = {}
        for other, table in tables.items():
            if table.ranks <= half and _alike(name, target, other, table):
                family.setdefault(table.key, table)
        nearest = [table for table in family.values() if table.ranks == half and half >= 4]
        if any(_nodes(t) == 1 == _nodes(target) or _nodes(t) >= 2 for t in nearest):
            yield name, target, list(family.values())


def _nodes(table: NcclTestsTable) -> int:
    return table.ranks // table.ranks_per_node


def _alike(name: str, table: NcclTestsTable, other: str, candidate: NcclTestsTable) -> bool:
    """Whether two tables are of one kind of machine: by their names, or their headers."""
    if (table.collective, table.dtype) != (candidate.collective, candidate.dtype):
        return False
    same_name = _SHAPE.sub("", name) == _SHAPE.sub("", other)
    return same_name or (table.hardware != "" and _kind(table) == _kind(candidate))


def _kind(table: NcclTestsTable) -> str:
    return re.sub(r"^\d+x\s*|\(.*?\)|\s+", "", table.hardware).lower()


def _device(name: str, table: NcclTestsTable) -> str:
    """The GPU that a table's header or name speaks of."""
    match = _DEVICE.search(f"{table.hardware} {name}")
    return match[0].upper() if match else "unknown GPU"


def doubled(name: str, target: NcclTestsTable, cluster: Cluster) -> Iterator[Case]:
    """Every usable size of a table, predicted from a cluster that holds smaller groups."""
    key = target.key
    for i in target.usable:
        cost = cluster.seconds(key.collective, target.bytes[i], key.shape, key.dtype)
        yield _case(name, target.bytes[i], cost.seconds, target.seconds[i], cost.error)
