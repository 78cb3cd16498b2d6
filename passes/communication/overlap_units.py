"""Overlap units: collectives that can overlap with compute, and the operators that only they need.

The forward and the backward each consist of main compute, in order, and units placed between its
nodes:

- **early**: a gather of values available at the start of the half, with the operators that prepare
  its operands. Main compute awaits it before its first use.
- **late**: the reduction of a gradient, and all operators that depend on it. Main compute never
  reads it.

Collectives can form a chain, as for two levels of an axis or for compressed reductions. Each later
unit of a chain begins with the wait for the collective before it. Where it reads several, as a
bucket over dp reads sums over tp, the wait for each but the last is a unit, and frees its operand.
All other collectives, such as statistics and redistributions, belong to main compute.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.passes.core.collective_ops import STARTS, results_of, start_all_gather, wait, wait_of
from autopar.passes.core.node_builder import ancestors

Kind = Literal["early", "late", "needed"]
"""Kind of a unit; "needed" is the last wait of a chain of early collectives."""
AT_MARK = 0.01
"""Fraction of the stretch between two marks that counts as the first mark."""


@dataclass(eq=False)
class Unit:
    """Nodes that move together.

    Attributes:
        kind: "early", "late" or "needed".
        nodes: nodes in order: waits, operators on their results, and the start if there is one.
        start: start of the unit's collective; None for a wait alone.
        behind: units whose results this one reads.
        mark: index of the mark where it is needed (early) or can start (late).
        level: number of collectives before it in its chain.
    """

    kind: Kind
    nodes: list[fx.Node]
    start: fx.Node | None
    behind: tuple[Unit, ...] = ()
    mark: int = 0
    level: int = 0


@dataclass(frozen=True, eq=False)
class Half:
    """The forward or the backward of a graph.

    Places are indices into `main`: place 3 is before `main[3]`, and place `len(main)` is the end.

    Attributes:
        main: main compute, which keeps its order.
        units: all other nodes, in dependency order.
        marks: ascending places: the start, first uses of gathers, places where reductions can
            start, collectives of main compute, the end.
    """

    main: tuple[fx.Node, ...]
    units: tuple[Unit, ...]
    marks: tuple[int, ...]

    def of(self, kind: Kind) -> list[Unit]:
        return [unit for unit in self.units if unit.kind == kind]

    def place(self, position: float) -> int:
        """The place of a position: position 2.5 is half-way, in nodes, between marks 2 and 3.

        Positions up to 2.01 are at mark 2; the fraction orders the units there.
        """
        mark = int(position)
        if mark >= len(self.marks) - 1:
            return self.marks[-1]
        low, high = self.marks[mark : mark + 2]
        part = max(0.0, position - mark - AT_MARK) / (1.0 - AT_MARK)
        return low + int(part * (high - low))

    def position(self, mark: int, place: int) -> float:
        """The position of a place between `mark` and the next mark."""
        low, high = self.marks[mark : mark + 2]
        return mark + AT_MARK + (1.0 - AT_MARK) * (place - low) / max(1, high - low)


def halves(graph: TrainingGraph) -> tuple[Half, Half]:
    """The units of the forward and of the backward of a graph with abstract collectives."""
    nodes = list(graph.graph.nodes)
    split = nodes.index(graph.backward_start)
    forward, backward = (
        [n for n in part if n.op in ("call_function", "get_attr")]
        for part in (nodes[:split], nodes[split:])
    )
    return _half(forward), _half(backward)


def sink_waits(graph: TrainingGraph) -> None:
    """Moves each wait of main compute to the first use of its results, within its half."""
    ends = {"forward": graph.backward_start, "backward": graph.output_node}
    for half in halves(graph):
        moves = {node for unit in half.units for node in unit.nodes}
        for start in (n for n in half.main if n.target in STARTS):
            done = wait_of(start)
            items = [item for item in results_of(start) if item is not None]
            if done in moves:
                continue
            uses = (user for item in items for user in item.users)
            place = min([*uses, ends[start.meta["phase"]]])
            for node in (done, *items):
                place.prepend(node)


def _half(nodes: list[fx.Node]) -> Half:
    late = _late(nodes)
    early = _early([node for node in nodes if node not in late], late)
    units = [*_units(nodes, late, "late"), *_units(nodes, early, "early")]
    owner = {node: unit for unit in units for node in unit.nodes}
    main = [node for node in nodes if node not in owner]
    at = {node: place for place, node in enumerate(main)}

    def place(unit: Unit) -> int:
        """The place where an early unit is needed, or where a late unit has its operands."""
        if unit.kind == "late":
            given = (n for node in unit.nodes for n in node.all_input_nodes)
            return max((at[n] + 1 for n in given if n in at), default=0)
        users = (user for node in unit.nodes for user in node.users)
        return min((at[user] for user in users if user in at), default=len(main))

    # Marks are alike on all ranks, whatever their rows. Positions are relative to marks, so that
    # all ranks start their collectives in one order; another order would hang.
    meetings: list[tuple[int, int, Unit | None]] = []
    for order, unit in enumerate(units):
        owners = (owner.get(n, unit) for node in unit.nodes for n in node.all_input_nodes)
        unit.behind = tuple(dict.fromkeys(before for before in owners if before is not unit))
        unit.level = max((u.level + (u.start is not None) for u in unit.behind), default=0)
        if unit.kind == "needed" or (unit.kind == "late" and not unit.behind):
            meetings.append((place(unit), order, unit))
    meetings += [(at[node], -1, None) for node in main if node.target in STARTS]
    meetings.sort(key=lambda item: item[:2])
    marks = (0, *(begin for begin, _, _ in meetings), len(main))
    index = {unit: mark for mark, (_, _, unit) in enumerate(meetings, 1)}
    for unit in units:
        unit.mark = index.get(unit, len(marks) - 1)
    for unit in reversed(units):
        if unit.kind == "early":
            unit.mark = min(unit.mark, bisect_right(marks, place(unit)) - 1)
        if unit.kind != "late":
            for before in unit.behind:
                before.mark = min(unit.mark, before.mark)
    for unit in units:
        if unit.kind == "late" and unit.behind:
            first = bisect_left(marks, place(unit))
            unit.mark = max(first, *(before.mark for before in unit.behind))
    return Half(tuple(main), tuple(units), marks)


def _late(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Reductions of gradients, and all operators that depend on them."""
    found: set[fx.Node] = set()
    for node in nodes:
        sums = node.target in STARTS and ("gradient" in node.meta or "summed" in node.meta)
        if sums or any(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


def _early(nodes: list[fx.Node], late: set[fx.Node]) -> set[fx.Node]:
    """Gathers of values available at the start of a half, with their waits and preparation.

    Gathers belong to main compute if main compute reads their operands, or if late units read their
    results.
    """
    inside, free = set(nodes), set[fx.Node]()
    for node in nodes:
        if all(n not in inside or n in free for n in node.all_input_nodes):
            free.add(node)
    gathers = [n for n in nodes if n.target is start_all_gather and n in free]
    ours = ancestors(gathers, inside).union(gathers)
    shared = set[fx.Node]()  # read by main compute, directly or through an operand
    for node in filter(ours.__contains__, nodes):
        if not shared.isdisjoint(node.all_input_nodes) or not ours.issuperset(node.users):
            shared.add(node)
    alone = [s for s in gathers if shared.isdisjoint(s.all_input_nodes)]
    alone = [s for s in alone if not any(u in late for r in results_of(s) if r for u in r.users)]
    found = ancestors(alone, inside).union(alone)
    for start in alone:
        found |= {n for n in (wait_of(start), *results_of(start)) if n is not None}
    return found


def _units(nodes: list[fx.Node], own: set[fx.Node], kind: Kind) -> list[Unit]:
    """Groups each start with the operators before it, and each other wait with its readers."""
    order = {node: index for index, node in enumerate(nodes) if node in own}
    found: list[Unit] = []
    group_of: dict[fx.Node, int] = {}
    for start in (node for node in order if node.target in STARTS):
        needs = {n for n in ancestors([start], own) if n not in group_of} | {start}
        arrivals = _arrivals(sorted(needs, key=order.__getitem__)) if kind == "late" else []
        for arrival in arrivals:
            group_of |= dict.fromkeys(arrival, len(found))
            found.append(Unit(kind, arrival, None))
            needs.difference_update(arrival)
        group_of |= dict.fromkeys(needs, len(found))
        found.append(Unit(kind, sorted(needs, key=order.__getitem__), start))
    for node in (node for node in order if node not in group_of):
        if node.target is wait:
            group_of[node] = len(found)
            found.append(Unit("needed" if kind == "early" else kind, [], None))
        else:
            group_of[node] = max(group_of[n] for n in node.all_input_nodes if n in group_of)
        found[group_of[node]].nodes.append(node)
    return found


def _arrivals(nodes: list[fx.Node]) -> list[list[fx.Node]]:
    """Each wait but that for the last collective, with the operators that read its results alone.

    `nodes` are what a start needs, in order.
    """
    waits = [node for node in nodes if node.target is wait]
    last = max(waits, key=lambda node: node.args[0], default=None)  # type: ignore[arg-type,return-value]
    read = dict[fx.Node, set[fx.Node]]()
    found: dict[fx.Node, list[fx.Node]] = {node: [] for node in waits if node is not last}
    for node in nodes:
        given = (read.get(n, set()) for n in node.all_input_nodes)
        read[node] = {node} if node.target is wait else set().union(*given)
        if len(read[node]) == 1 and node.target not in STARTS:
            (arrived,) = read[node]
            if arrived in found:
                found[arrived].append(node)
    return list(found.values())
