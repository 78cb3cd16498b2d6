"""`autopar collectives`: what each algorithm would take for a collective, the pick, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import networkx as nx

from autopar.commands.collectives_text import Question, Row, origins, table, why
from autopar.commands.option_types import ranks, size
from autopar.commands.plain_console import PlainConsole
from autopar.cost_model.cluster import Cluster, shipped_clusters
from autopar.cost_model.collectives import COLLECTIVES, ring
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.curves import Curve
from autopar.cost_model.fabric import Levels, levels
from autopar.cost_model.formulas import Formula, formulas
from autopar.cost_model.measured import CurveKey
from autopar.cost_model.nccl import Tuning
from autopar.cost_model.nccl_constants import ALGORITHMS, LATEST, PROTOCOLS
from autopar.cost_model.nccl_graphs import communicator_on
from autopar.cost_model.nccl_tests import read_tables
from autopar.cost_model.shape import GroupShape
from autopar.cost_model.topology import repeated
from autopar.cost_model.tuner import NAMES, export
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
    question = ask(options.collective, options.bytes, shape, options.cluster)
    console, notes = PlainConsole(), list[str]()
    if not console.is_terminal:
        console.width = max(console.width, 120)
    seen = rows_seen(question, options.nccl, notes)
    level = levels_of(question)
    ways = formulas(question.collective, shape.ranks, shape.nodes)
    modelled = rows_of(question, ways, level)
    rows = [*seen, *modelled]
    console.print(table(question, rows, modelled[0]))
    footnotes = [f"[{number}] {origin}" for number, origin in enumerate(origins(rows), 1)]
    for line in [*why(question, ways, level, modelled, seen), *notes, *footnotes]:
        console.print(line, soft_wrap=True, highlight=False)
    if options.tuner:
        tunings = [Tuning.of(_communicator(question), options.nccl)]
        text = export(tunings, forced_of(options.forced, shape))
        Path(options.tuner).write_text(text)
        console.print(f"wrote {options.tuner}; see docs/cost-model.md for its use", highlight=False)
    return 0


def ask(collective: str, nbytes: int, shape: GroupShape, where: str | None) -> Question:
    """The question, with what is known of the cluster called `where`.

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
    return Question(collective, nbytes, shape, cluster, graph)


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
        way, _, file = text.partition("=")
        algorithm, _, protocol = way.partition("/")
        if algorithm not in ALGORITHMS or protocol not in PROTOCOLS:
            raise StrategyError(f"--forced {text!r}: say ALGORITHM/PROTOCOL=FILE, as ring/ll=a.log")
        tables = read_tables(file, ranks=shape.ranks, ranks_per_node=shape.ranks_per_node)
        for measured in tables:
            if (measured.ranks, measured.ranks_per_node) != (shape.ranks, shape.ranks_per_node):
                raise ClusterError(f"{file} is of {measured.key.shape}, not of {shape}")
            found[measured.collective, algorithm, protocol] = measured.curve()
    return found


def levels_of(question: Question) -> Levels:
    """The two levels of links, from the topology, or else from what was measured on one machine."""
    if question.graph is not None:
        return levels(question.graph, question.shape)
    cluster, shape = question.cluster, question.shape
    entry = cluster.curves.get(CurveKey(question.collective, shape))
    if entry is not None and shape.nodes == 1:
        latency, rate = _fitted(entry.curve, question.collective, shape.ranks, cluster.backend)
        source = f"modelled by a ring fitted to the curve {entry.provenance}"
    elif cluster.link is not None and shape.nodes == 1:
        latency, rate = cluster.link.step_s, cluster.link.bytes_per_s
        source = cluster.provenance
    else:
        raise ClusterError(
            f"cluster {cluster.name!r} has neither a topology nor a curve of {question.collective} "
            f"over {shape} on one machine: measure it, or give a cluster that has one"
        )
    return Levels(latency, rate, latency, rate, "between neighbours", source)


def _fitted(curve: Curve, collective: str, ranks: int, backend: str) -> tuple[float, float]:
    """Latency and bandwidth of a message, if the curve is that of a ring."""
    steps, share = ring(collective, ranks, backend)
    first, last = curve.pieces[0], curve.pieces[-1]
    return first.latency_s / steps, share / max(last.seconds_per_byte, 1e-15)


def rows_seen(question: Question, version: str, notes: list[str]) -> list[Row]:
    """What the cluster's curve says and what NCCL's model says, where there are such."""
    rows = []
    if question.cluster.curves:
        try:
            cost = question.cluster.seconds(question.collective, question.nbytes, question.shape)
            rows.append(Row("the cluster's curve", cost))
        except ClusterError as error:
            notes.append(f"no curve: {error}")
    if question.collective not in NAMES:
        return rows
    try:
        communicator = _communicator(question)
    except ClusterError as error:
        notes.append(f"no figure by NCCL's model: {error}")
        return rows
    choice = Tuning.of(communicator, version).pick(question.collective, question.nbytes)
    name = f"NCCL: {choice.algorithm}/{choice.protocol} x {choice.channels}"
    return [*rows, Row(name, choice.cost)]


def _communicator(question: Question) -> Any:
    cluster = question.cluster
    if cluster.backend != "nccl":
        raise ClusterError(f"this cluster runs {cluster.backend}")
    if question.graph is None:
        raise ClusterError("this cluster has no topology")
    return communicator_on(question.graph, question.shape, cluster.device)


def rows_of(question: Question, ways: Sequence[Formula], level: Levels) -> list[Row]:
    """The algorithms, fastest first."""
    shape = question.shape
    rows = [
        Row(
            way.algorithm,
            Cost(
                way(question.nbytes, shape.ranks, shape.nodes, level),
                f"modelled by {way.source}",
            ),
            way.count(question.nbytes, shape.ranks, shape.nodes, level),
            level.bottleneck,
        )
        for way in ways
    ]
    return sorted(rows, key=lambda row: row.cost.seconds)
