"""What `autopar collectives` prints: the table, the pick and why, and where others take over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import networkx as nx
import sympy
from rich import box
from rich.table import Table

from autopar.commands.measure import in_units
from autopar.cost_model.algorithms.crossover import crossovers, fastest
from autopar.cost_model.algorithms.formulas import Formula, alpha, alpha_N, beta, beta_N
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.cost import Cost
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.nccl_tests import bus_factor
from autopar.cost_model.topology.link_levels import Levels


@dataclass(frozen=True)
class Row:
    """One way to run the collective.

    Attributes:
        name: the algorithm, or who says it.
        cost: its time and where that comes from.
        steps: messages that follow one another; None if not known.
        bottleneck: the link that limits it; empty if not known.
    """

    name: str
    cost: Cost
    steps: int | None = None
    bottleneck: str = ""


@dataclass(frozen=True)
class Request:
    """A collective on a cluster.

    Attributes:
        collective: one of `collectives.COLLECTIVES`.
        nbytes: its size.
        shape: the groups that run it.
        cluster: what is known of the machines.
        graph: its topology, if known, with as many machines as the group needs.
    """

    collective: str
    nbytes: int
    shape: GroupShape
    cluster: Cluster
    graph: nx.Graph | None


def origins(rows: Sequence[Row]) -> list[str]:
    """The origins of the rows' times, each once: footnotes of the table."""
    return list(dict.fromkeys(row.cost.provenance for row in rows))


def table(request: Request, rows: Sequence[Row], pick: Row) -> Table:
    """One row for each way: time, bus bandwidth, steps, the limiting link, the origin's number."""
    what = f"{request.collective} of {request.nbytes:,} bytes ({in_units(request.nbytes)})"
    title = f"{what}: {request.shape}, on {request.cluster.name}"
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("algorithm", no_wrap=True)
    for name in ("ms", "busbw GB/s", "steps"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("limited by", no_wrap=True)
    drawn.add_column("origin", no_wrap=True)
    notes = origins(rows)
    share = bus_factor(request.collective, request.shape.ranks)
    for row in rows:
        drawn.add_row(
            f"{row.name} *" if row is pick else row.name,
            f"{row.cost.seconds * 1e3:.4g}" + (f" ±{row.cost.error:.0%}" if row.cost.error else ""),
            f"{share * request.nbytes / row.cost.seconds / 1e9:.4g}",
            "" if row.steps is None else str(row.steps),
            row.bottleneck,
            f"{row.cost.kind} [{notes.index(row.cost.provenance) + 1}]",
        )
    return drawn


def why(
    request: Request,
    algorithms: Sequence[Formula],
    level: Levels,
    rows: Sequence[Row],
    seen: Sequence[Row],
) -> list[str]:
    """Sentences: the pick, what its time is made of, and where others take over."""
    shape, best = request.shape, rows[0]
    chosen = next(algorithm for algorithm in algorithms if algorithm.algorithm == best.name)
    latency = chosen(0, shape.ranks, shape.nodes, level) / best.cost.seconds
    first = (
        f"* {best.name}, as modelled: {latency:.0%} latency of {best.steps} steps, the rest bytes"
    )
    if len(rows) > 1:
        ratio = rows[1].cost.seconds / best.cost.seconds - 1
        first += f"; {rows[1].name} takes {ratio:.1%} longer"
    first += "".join(
        f"; {row.name} takes {row.cost.seconds / best.cost.seconds:.3g} times as long"
        for row in seen[:1]
    )
    links = []
    if shape.ranks_per_node > 1:
        links.append(f"a rank {_link(level.latency_s, level.bytes_per_s)} inside a machine")
    if shape.nodes > 1:
        links.append(f"a machine {_link(level.node_latency_s, level.node_bytes_per_s)} to others")
    narrowest = f"the narrowest is {level.bottleneck}, {level.provenance}"
    stretches = fastest(algorithms, shape.ranks, shape.nodes, level)
    parts = [
        name
        + (f" from {in_units(round(low))}" if low else "")
        + (f" to {in_units(round(high))}" if high else "")
        for name, low, high in stretches
    ]
    by_size = f"fastest by size, modelled by the formulas' crossovers: {', '.join(parts)}"
    return [
        f"{first}.",
        f"links: {', '.join(links)}; {narrowest}.",
        f"{by_size}.",
        *_turns(algorithms, shape, level, [name for name, *_ in stretches]),
    ]


def _turns(
    algorithms: Sequence[Formula], shape: GroupShape, level: Levels, names: Sequence[str]
) -> list[str]:
    """Where each of the fastest gives way to the next, in closed form."""
    by_name = {algorithm.algorithm: algorithm for algorithm in algorithms}
    outside = level.node_bytes_per_s < level.bytes_per_s, level.node_latency_s > level.latency_s
    decided = {
        sympy.Min(beta, beta_N): beta_N if outside[0] else beta,
        sympy.Max(alpha, alpha_N): alpha_N if outside[1] else alpha,
    }
    lines = []
    for one, other in pairwise(names):
        points = crossovers(by_name[one], by_name[other], shape.ranks, shape.nodes, level)
        for size, expression in points.items():
            form = sympy.factor(sympy.together(expression.subs(decided)))
            lines.append(f"  {one} = {other} at {in_units(round(size))} = {form}")
    return lines


def _link(latency_s: float, bytes_per_s: float) -> str:
    return f"{latency_s * 1e6:.3g} us, {bytes_per_s / 1e9:.4g} GB/s"
