"""Tables of `autopar show --placements`: placements and redistributions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import fx

from autopar.core.ir.aliases import is_view
from autopar.core.ir.graph import TrainingGraph, elements, operands
from autopar.core.ir.placement import OpStrategy, Replicate
from autopar.core.ir.roles import Parameter
from autopar.core.plan.partition import NodeStrategies
from autopar.formatting import human_bytes
from autopar.passes.core.collective_ops import is_name
from autopar.passes.rules.redistribute import redistribute_steps
from autopar.passes.rules.registry import rule_of
from autopar.planner.placement.costs import PlacementCosts
from autopar.planner.placement.redistributions import PlannedRedistribution, redistributions
from autopar.planner.placement.repeated_nodes import block_of_nodes, repeated

COLUMNS = ("kind", "what", "shape", "placement", "converted", "sends", "takes")


@dataclass(frozen=True)
class PlacementTable:
    """Placements of one kind of block: a row of `COLUMNS` for each operator and redistribution."""

    title: str
    rows: tuple[tuple[str, ...], ...]

    def table(self) -> Table:
        """A table of 80 columns; redistributions stand below their operator."""
        drawn = Table(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("", "operator", "shape, or message", "placement, or time"):
            drawn.add_column(heading, overflow="fold")
        for kind, what, shape, placement, converted, sends, takes in self.rows:
            shown = what or f"  {converted}"
            cells = f"{shape} {sends}".strip(), f"{placement} {takes}".strip()
            drawn.add_row(kind, shown, *cells)
        return drawn

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can store."""
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows}


def placement_tables(
    graph: TrainingGraph, op_strategies: Mapping[fx.Node, OpStrategy], prices: PlacementCosts
) -> Iterator[PlacementTable | str]:
    """One table per kind of block, then lists of replicated operators."""
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    names = {node: role.name for node, role in roles.items() if isinstance(role, Parameter)}
    lies = {name: op_strategies[node].results[0] for node, name in names.items()}
    same = dict(repeated(graph, lies))
    blocks = block_of_nodes(graph)
    alike: dict[str, dict[str, None]] = {}
    for node, stands in same.items():
        alike.setdefault(blocks[stands], {})[blocks[node]] = None
    converted: dict[fx.Node, list[PlannedRedistribution]] = {}
    for made in redistributions(graph, same, op_strategies):
        converted.setdefault(made.value.node, []).append(made)
    for first, members in alike.items():
        nodes = [n for n in graph.graph.nodes if n in same and same[n] is n and blocks[n] == first]
        title = first or "outside of blocks"
        title += f" and {len(members) - 1} like it" if len(members) > 1 else ""
        rows = (
            _rows(node, names.get(node), op_strategies, converted.get(node, ()), prices)
            for node in nodes
        )
        yield PlacementTable(title, tuple(chain.from_iterable(rows)))
    yield from _whole(graph, op_strategies)


def _rows(
    node: fx.Node,
    name: str | None,
    op_strategies: Mapping[fx.Node, OpStrategy],
    converted: Sequence[PlannedRedistribution],
    prices: PlacementCosts,
) -> Iterator[tuple[str, ...]]:
    """Row of a parameter or operator, then its redistributions; inputs and views need some."""
    plain = name is None and not converted
    if node not in op_strategies or (plain and (is_view(node) or node.op != "call_function")):
        return
    op_strategy = op_strategies[node]
    results = [t for t in elements(node) if isinstance(t, torch.Tensor)]
    what = re.sub(r"\.\d+\.", ".*.", name) if name else _target(node)
    sent, seconds = "", ""
    if op_strategy.lowering:
        traffic = prices.traffic(node, op_strategy)
        sent = ", ".join(f"{kind} {human_bytes(size)}" for kind, size in traffic)
        seconds = f"by {op_strategy.lowering}"
    phase = "parameter" if name else node.meta.get("phase", "")
    lies = ", ".join(dict.fromkeys(map(str, op_strategy.results)))
    yield phase, what, str(list(results[0].shape)) if results else "", lies, "", sent, seconds
    for made in converted:
        steps = redistribute_steps(made.before, made.after) or ()
        kinds = [step for step in steps if step.collective]
        size = sum(prices.message_bytes(step, made.value) for step in kinds)
        cost = prices.redistribution(made.value, made.before, made.after)
        yield (
            *("",) * 4,
            f"{made.before} -> {made.after}" + (f" x{made.count}" if made.count > 1 else ""),
            f"{', '.join(step.kind for step in kinds)} {human_bytes(size)}" if kinds else "",
            f"{cost.seconds * 1e6:.0f} us {cost.kind}",
        )


def _target(node: fx.Node) -> str:
    return str(node.target).removeprefix("aten.").removesuffix(".default")


def _whole(graph: TrainingGraph, op_strategies: Mapping[fx.Node, OpStrategy]) -> Iterator[str]:
    """Lists of replicated operators, without views."""
    ruled, unruled = Counter[str](), Counter[str]()
    for node in graph.calls():
        op_strategy = op_strategies.get(node)
        if op_strategy is None or is_view(node) or op_strategy.lowering:
            continue
        if {*op_strategy.operands, *op_strategy.results} <= {Replicate()}:
            (unruled if rule_of(node.target) is None else ruled)[_target(node)] += 1
    for title, found in (("without a rule", unruled), ("cheapest whole", ruled)):
        if found:
            each = ", ".join(f"{name} x{count}" for name, count in found.most_common())
            yield f"run whole on every rank, {title}: {each}"


def complete_strategies(
    graph: TrainingGraph, op_strategies: NodeStrategies
) -> dict[fx.Node, OpStrategy]:
    """The strategy of every operator and placeholder; unnamed nodes are replicated."""
    named = dict(op_strategies)
    return {
        node: named.get(node.name)
        or OpStrategy((Replicate(),) * len(operands(node)), (Replicate(),) * len(elements(node)))
        for node in graph.graph.nodes
        if node.op != "output" and not is_name(node)
    }
