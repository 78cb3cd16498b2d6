"""`autopar collectives`: times of one collective, by algorithm and protocol, and NCCL's pick."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from autopar.cli.help_text import JSON, add_command, print_json
from autopar.cli.option_types import ranks, size
from autopar.cli.plain_console import PlainConsole, plain_table
from autopar.core.common.documents import write_text
from autopar.core.ir.messages import COLLECTIVES
from autopar.cost_model.cluster.cluster import Cluster, shipped_clusters
from autopar.cost_model.cost import ClusterError, Cost
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.channels import Communicator, communicator_on
from autopar.cost_model.nccl.constants import ALGORITHMS, LATEST, PROTOCOLS, constants_of
from autopar.cost_model.nccl.model import Tuning
from autopar.cost_model.nccl.nccl_tests import bus_factor, read_tables
from autopar.cost_model.nccl.tuner import NAMES, choices_by_size, export
from autopar.errors import StrategyError
from autopar.formatting import human_bytes

DEFAULT = "dgx-a100"


def add_to(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    names = ", ".join(shipped_clusters())
    text = "time of a collective by algorithm and protocol, and NCCL's pick"
    example = "autopar collectives --cluster dgx-h100 --bytes 64MiB --ranks 16 --nodes 2"
    parser = add_command(commands, "collectives", text, example)
    add = parser.add_argument
    add("--bytes", type=size, required=True, help="message size, such as 64MiB")
    add("--ranks", type=ranks, required=True, help="ranks of the group")
    add("--nodes", type=ranks, default=1, help="nodes of the group")
    add("--groups", type=ranks, default=1, help="groups that run at once")
    kinds = ", ".join(COLLECTIVES)
    add("--collective", default="all_reduce", choices=COLLECTIVES, metavar="NAME", help=kinds)
    add(
        "--cluster",
        metavar="NAME|FILE",
        default=DEFAULT,
        help=f"JSON file of a cluster, or one of {names} (default {DEFAULT})",
    )
    add("--nccl", default=LATEST, metavar="VERSION", help="version of NCCL")
    add("--tuner", metavar="FILE", help="write NCCL's choices as a tuner plugin's configuration")
    add(
        "--forced",
        action="append",
        default=[],
        metavar="ALGORITHM/PROTOCOL=FILE",
        help="output of nccl-tests with NCCL_ALGO and NCCL_PROTO set; --tuner then writes the "
        "fastest measured combination",
    )
    add("--json", action="store_true", help=JSON)
    parser.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """`autopar collectives`."""
    collective, nbytes = options.collective, options.bytes
    if options.ranks < 2 or options.ranks % options.nodes:
        raise StrategyError(f"{options.ranks} ranks do not fill {options.nodes} nodes evenly")
    shape = GroupShape(options.ranks, options.ranks // options.nodes, options.groups)
    cluster, constants = cluster_for(options.cluster, shape), constants_of(options.nccl)
    tuning, notes, times = None, list[str](), dict[str, Cost]()
    try:
        tuning = Tuning(_communicator(cluster, shape), constants)
    except ClusterError as error:
        if options.tuner:
            raise
        notes.append(f"no times of NCCL's algorithms: {error}")
    if tuning is not None and collective in NAMES:
        times = algorithm_times(tuning, collective, nbytes)
        notes += pick_lines(tuning, collective, nbytes)
    elif tuning is not None:
        notes.append(f"no times of NCCL's algorithms: NCCL's model has no {collective}")
    try:
        times = {"the planner's price": cluster.seconds(collective, nbytes, shape), **times}
    except ClusterError as error:
        if not times:
            raise
        notes.append(f"no planner's price: {error}")
    if options.tuner and tuning is not None:
        text = export([tuning], forced_curves(options.forced, shape))
        write_text(options.tuner, text, StrategyError)
        notes.append(f"wrote {options.tuner}; see docs/cost-model.md for its use")
    asked = f"{collective} of {nbytes:,} bytes ({human_bytes(nbytes)}): {shape}, on {cluster.name}"
    bus_bytes = bus_factor(collective, shape.ranks) * nbytes
    if options.json:
        found = [_cost_fields(name, cost, bus_bytes) for name, cost in times.items()]
        print_json({"asked": asked, "bytes": nbytes, "times": found, "notes": notes})
    else:
        _print_table(asked, times, bus_bytes, notes)
    return 0


def _print_table(
    title: str, times: Mapping[str, Cost], bus_bytes: float, notes: Sequence[str]
) -> None:
    sources = list(dict.fromkeys(cost.provenance for cost in times.values()))
    right = ("ms", "busbw GB/s", "source")
    grid = plain_table(title, ["algorithm/protocol x channels"], right)
    for name, cost in times.items():
        grid.add_row(
            name,
            f"{cost.seconds * 1e3:.4g}" + (f" ±{cost.error:.0%}" if cost.error else ""),
            f"{bus_bytes / cost.seconds / 1e9:.4g}",
            f"{cost.kind} [{sources.index(cost.provenance) + 1}]",
        )
    console = PlainConsole()
    console.print(grid)
    for line in [*notes, *(f"[{number}] {source}" for number, source in enumerate(sources, 1))]:
        console.print(line, highlight=False)


def _cost_fields(name: str, cost: Cost, bus_bytes: float) -> dict[str, Any]:
    return {
        "name": name,
        "seconds": cost.seconds,
        "error": cost.error,
        "bus_bytes_per_s": bus_bytes / cost.seconds,
        "kind": cost.kind,
        "provenance": cost.provenance,
    }


def cluster_for(name: str, shape: GroupShape) -> Cluster:
    """The cluster of a name or file, with as many nodes as the groups of a shape need."""
    if name not in shipped_clusters() and not Path(name).is_file():
        known = ", ".join(shipped_clusters())
        raise ClusterError(f"there is no cluster {name!r}: give a file, or one of {known}")
    cluster = Cluster.load(name)
    groups_per_node = cluster.ranks_per_node // shape.ranks_per_node
    if groups_per_node == 0:
        raise ClusterError(
            f"{shape}: a node of {cluster.name} has {cluster.ranks_per_node} ranks. Give more "
            "--nodes"
        )
    nodes = shape.nodes * -(-shape.groups // groups_per_node)
    fits = nodes * cluster.ranks_per_node <= cluster.world_size
    return cluster if fits else cluster.of_nodes(nodes)


def _communicator(cluster: Cluster, shape: GroupShape) -> Communicator:
    if cluster.backend != "nccl":
        raise ClusterError(f"this cluster runs {cluster.backend}")
    if cluster.topology is None:
        raise ClusterError("this cluster has no topology")
    return communicator_on(cluster.topology, shape, cluster.device)


def forced_curves(texts: Sequence[str], shape: GroupShape) -> dict[tuple[str, str, str], Curve]:
    """Curves of texts such as "ring/ll=all_reduce.log", by collective, algorithm and protocol."""
    curves = {}
    for text in texts:
        combination, _, file = text.partition("=")
        algorithm, _, protocol = combination.partition("/")
        if algorithm not in ALGORITHMS or protocol not in PROTOCOLS:
            raise StrategyError(f"--forced {text!r}: say ALGORITHM/PROTOCOL=FILE, as ring/ll=a.log")
        tables = read_tables(file, ranks=shape.ranks, ranks_per_node=shape.ranks_per_node)
        for measured in tables:
            if (measured.ranks, measured.ranks_per_node) != (shape.ranks, shape.ranks_per_node):
                raise ClusterError(f"{file} is of {measured.key.shape}, not of {shape}")
            curves[measured.collective, algorithm, protocol] = measured.curve()
    return curves


def algorithm_times(tuning: Tuning, collective: str, nbytes: int) -> dict[str, Cost]:
    """The time of each algorithm and protocol that NCCL can run, fastest first."""
    source = f"modelled by NCCL {tuning.constants.name}'s tuning"
    return {
        f"{algorithm}/{protocol} x {tuning.channels(nbytes, algorithm, protocol)}": Cost(s, source)
        for (algorithm, protocol), s in tuning.times(collective, nbytes).items()
    }


def pick_lines(tuning: Tuning, collective: str, nbytes: int) -> Iterator[str]:
    """Sentences on NCCL's pick at a size, and on its picks at all other sizes."""
    pick = tuning.pick(collective, nbytes)
    name = f"{pick.algorithm}/{pick.protocol}"
    latency_s = tuning.latency(collective, pick.algorithm, pick.protocol) * 1e-6
    yield (
        f"NCCL {tuning.constants.name} picks {name} on {pick.channels} channels: "
        f"{min(1.0, latency_s / pick.cost.seconds):.0%} of its time is latency."
    )
    sizes = groupby(choices_by_size(tuning, collective), key=lambda item: item[1][:2])
    ranges = [("/".join(choice), next(group)[0]) for choice, group in sizes]
    first, *later = [f"{name} from {human_bytes(start)}" for name, start in ranges]
    yield f"By size: {', '.join([first.removesuffix(' from 0 B'), *later])}."
