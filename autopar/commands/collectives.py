"""`autopar collectives`: what each algorithm would take for a collective, the pick, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from autopar.commands.collectives_text import Request, Row, origins, table, why
from autopar.commands.option_types import ranks, size
from autopar.commands.plain_console import PlainConsole
from autopar.cost_model.algorithms.formulas import Formula, formulas
from autopar.cost_model.cluster.cluster import Cluster, shipped_clusters
from autopar.cost_model.collectives import COLLECTIVES, ring
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.channels import communicator_on
from autopar.cost_model.nccl.constants import ALGORITHMS, LATEST, PROTOCOLS
from autopar.cost_model.nccl.model import Tuning
from autopar.cost_model.nccl.nccl_tests import read_tables
from autopar.cost_model.nccl.tuner import NAMES, export
from autopar.cost_model.topology.link_levels import Levels, levels
from autopar.cost_model.topology.topology import repeated
from autopar.errors import StrategyError

DEFAULT = "dgx-a100"


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    names = ", ".join(shipped_clusters())
    parser = commands.add_parser(
        "collectives",
        help="what each algorithm would take for a collective, and which one to pick",
    )
    parser.add_argument("--bytes", type=size, required=True, help="such as 64MB or 64MiB")
    parser.add_argument("--ranks", type=ranks, required=True, help="ranks of the group")
    parser.add_argument("--nodes", type=ranks, default=1, help="nodes that it lies on, evenly")
    parser.add_argument("--groups", type=ranks, default=1, help="such groups that run at once")
    parser.add_argument("--collective", default="all_reduce", choices=COLLECTIVES)
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        help=f"JSON file of a cluster, or one of {names} (default {DEFAULT})",
    )
    parser.add_argument("--nccl", default=LATEST, metavar="VERSION", help="whose model to show")
    parser.add_argument(
        "--tuner", metavar="FILE", help="write NCCL's choices as a tuner plugin's configuration"
    )
    parser.add_argument(
        "--forced",
        action="append",
        default=[],
        metavar="ALGORITHM/PROTOCOL=FILE",
        help="what nccl-tests printed with NCCL_ALGO and NCCL_PROTO set; --tuner then writes the "
        "fastest of what was measured",
    )
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """`autopar collectives`."""
    if options.nodes < 1 or options.ranks < 2 or options.ranks % options.nodes:
        raise StrategyError(f"{options.ranks} ranks do not fill {options.nodes} nodes evenly")
    shape = GroupShape(options.ranks, options.ranks // options.nodes, options.groups)
    request = ask(options.collective, options.bytes, shape, options.cluster)
    console, notes = PlainConsole(), list[str]()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    seen = rows_seen(request, options.nccl, notes)
    level = levels_of(request)
    algorithms = formulas(request.collective, shape.ranks, shape.nodes)
    modelled = rows_of(request, algorithms, level)
    rows = [*seen, *modelled]
    console.print(table(request, rows, modelled[0]))
    footnotes = [f"[{number}] {origin}" for number, origin in enumerate(origins(rows), 1)]
    for line in [*why(request, algorithms, level, modelled, seen), *notes, *footnotes]:
        console.print(line, soft_wrap=True, highlight=False)
    if options.tuner:
        tunings = [Tuning.of(_communicator(request), options.nccl)]
        text = export(tunings, forced_of(options.forced, shape))
        Path(options.tuner).write_text(text)
        console.print(f"wrote {options.tuner}; see docs/cost-model.md for its use", highlight=False)
    return 0


def ask(collective: str, nbytes: int, shape: GroupShape, where: str | None) -> Request:
    """The request, with what is known of the cluster called `where`.

    Raises:
        ClusterError: there is no such cluster, or the group does not fit on it.
    """
    name = where or DEFAULT
    if name not in shipped_clusters() and not Path(name).is_file():
        known = ", ".join(shipped_clusters())
        raise ClusterError(f"there is no cluster {name!r}: give a file, or one of {known}")
    cluster = Cluster.load(name)
    graph = cluster.topology
    if graph is not None:
        graph = repeated(graph, _machines(graph, shape))
    return Request(collective, nbytes, shape, cluster, graph)


def _machines(graph: nx.Graph, shape: GroupShape) -> int:
    """Machines that the groups of a shape need."""
    kinds = [name.partition("/")[0] for name, kind in graph.nodes(data="kind") if kind == "device"]
    rows = kinds.count(kinds[0]) // shape.ranks_per_node
    if rows == 0:
        raise ClusterError(f"{shape}: a machine has {kinds.count(kinds[0])} devices")
    return shape.nodes * -(-shape.groups // rows)


def forced_of(texts: Sequence[str], shape: GroupShape) -> dict[tuple[str, str, str], Curve]:
    """The curves of texts such as "ring/ll=all_reduce.log", by collective, algorithm, protocol.

    Raises:
        ClusterError: a file is of another group, or no output of nccl-tests.
    """
    found = {}
    for text in texts:
        choice, _, file = text.partition("=")
        algorithm, _, protocol = choice.partition("/")
        if algorithm not in ALGORITHMS or protocol not in PROTOCOLS:
            raise StrategyError(f"--forced {text!r}: say ALGORITHM/PROTOCOL=FILE, as ring/ll=a.log")
        tables = read_tables(file, ranks=shape.ranks, ranks_per_node=shape.ranks_per_node)
        for measured in tables:
            if (measured.ranks, measured.ranks_per_node) != (shape.ranks, shape.ranks_per_node):
                raise ClusterError(f"{file} is of {measured.key.shape}, not of {shape}")
            found[measured.collective, algorithm, protocol] = measured.curve()
    return found


def levels_of(request: Request) -> Levels:
    """The two levels of links, from the topology, or else from what was measured on one machine."""
    if request.graph is not None:
        return levels(request.graph, request.shape)
    cluster, shape = request.cluster, request.shape
    entry = cluster.curves.get(CurveKey(request.collective, shape))
    if entry is not None and shape.nodes == 1:
        latency, rate = _fitted(entry.curve, request.collective, shape.ranks, cluster.backend)
        source = f"modelled by a ring fitted to the curve {entry.provenance}"
    elif cluster.link is not None and shape.nodes == 1:
        latency, rate = cluster.link.step_s, cluster.link.bytes_per_s
        source = cluster.provenance
    else:
        raise ClusterError(
            f"cluster {cluster.name!r} has neither a topology nor a curve of {request.collective} "
            f"over {shape} on one machine: measure it, or give a cluster that has one"
        )
    return Levels(latency, rate, latency, rate, "between neighbours", source)


def _fitted(curve: Curve, collective: str, ranks: int, backend: str) -> tuple[float, float]:
    """Latency and bandwidth of a message, if the curve is that of a ring."""
    steps, share = ring(collective, ranks, backend)
    first, last = curve.pieces[0], curve.pieces[-1]
    return first.latency_s / steps, share / max(last.seconds_per_byte, 1e-15)


def rows_seen(request: Request, version: str, notes: list[str]) -> list[Row]:
    """What the cluster's curve says and what NCCL's model says, where there are such."""
    rows = []
    if request.cluster.curves:
        try:
            cost = request.cluster.seconds(request.collective, request.nbytes, request.shape)
            rows.append(Row("the cluster's curve", cost))
        except ClusterError as error:
            notes.append(f"no curve: {error}")
    if request.collective not in NAMES:
        return rows
    try:
        communicator = _communicator(request)
    except ClusterError as error:
        notes.append(f"no figure by NCCL's model: {error}")
        return rows
    choice = Tuning.of(communicator, version).pick(request.collective, request.nbytes)
    name = f"NCCL: {choice.algorithm}/{choice.protocol} x {choice.channels}"
    return [*rows, Row(name, choice.cost)]


def _communicator(request: Request) -> Any:
    cluster = request.cluster
    if cluster.backend != "nccl":
        raise ClusterError(f"this cluster runs {cluster.backend}")
    if request.graph is None:
        raise ClusterError("this cluster has no topology")
    return communicator_on(request.graph, request.shape, cluster.device)


def rows_of(request: Request, algorithms: Sequence[Formula], level: Levels) -> list[Row]:
    """The algorithms, fastest first."""
    shape = request.shape
    rows = [
        Row(
            algorithm.algorithm,
            Cost(
                algorithm(request.nbytes, shape.ranks, shape.nodes, level),
                f"modelled by {algorithm.source}",
            ),
            algorithm.count(request.nbytes, shape.ranks, shape.nodes, level),
            level.bottleneck,
        )
        for algorithm in algorithms
    ]
    return sorted(rows, key=lambda row: row.cost.seconds)
