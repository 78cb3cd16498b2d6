"""`find_region`: the operators between the last product and its gradients, which see rows alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, operands, render_node, tensors
from autopar.core.ir.mesh_levels import axis_of_level
from autopar.core.operators.experts import expert_mm
from autopar.passes.chunks.rows import Carriage, Carried, Rows, candidates, rows_through
from autopar.passes.core.collective_ops import STARTS, axis_of, is_name
from autopar.passes.core.node_builder import ancestors, aten, is_random, is_view
from autopar.passes.rules.loops import Operator, overloads
from autopar.passes.rules.registry import CANONICAL, KERNELS

HEADS = (aten.mm.default, aten.addmm.default)
"""Products whose result may be computed in chunks."""

PRODUCTS = frozenset((*overloads("mm addmm bmm baddbmm convolution"), expert_mm))
PRODUCTS |= frozenset((*CANONICAL, *KERNELS))
"""Operators whose results are never computed again, nor for the sake of a reader."""

REDUCERS = frozenset(
    overloads(
        "sum.dim_IntList amax amin max.dim min.dim mean.dim logsumexp gather argmax argmin "
        "any.dim all.dim select.int prod.dim_int linalg_vector_norm var.correction nll_loss_forward"
    )
)
"""Operators that leave one number a row: of a single column, shapes do not tell them apart."""

MODEL_AXES = ("tp", "ep")
"""Axes whose ranks have the same rows, and may reduce each chunk of them."""


class Whole(Exception):
    """The rows cannot be divided; the text says why."""


@dataclass(frozen=True)
class Region:
    """Operators that run once a chunk, each half in the order of the graph.

    Attributes:
        rows: number of rows.
        carried: what each value of the operators has of the rows.
        carriages: rows of each operator's operands and results.
        wide: values with several numbers a row, which only the operators read.
    """

    product: fx.Node
    rows: int
    forward: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    carried: dict[fx.Node, Carried]
    carriages: dict[fx.Node, Carriage]
    wide: frozenset[fx.Node]


def find_region(graph: TrainingGraph, chunks: int) -> Region | str:
    """The region of the largest product that a loss reads, or why there is none."""
    order = list(graph.calls())
    heads = [n for n in order if n.target in HEADS and n.meta["phase"] == "forward"]
    best: Region | None = None
    reason = "no product is read by a loss"
    for head in reversed(heads):
        if best is not None and tensors(head)[0].numel() <= tensors(best.product)[0].numel():
            continue
        found = _region_of(head, order, chunks)
        if isinstance(found, Region):
            best = found
        elif head is heads[-1]:
            reason = found
    return best or reason


def _region_of(head: fx.Node, order: list[fx.Node], chunks: int) -> Region | str:
    reason = ""
    result = tensors(head)[0]
    shapes = [shape for shape in _viewed_shapes(head) if math.prod(shape[:-1]) == result.shape[-2]]
    for rows in dict.fromkeys(candidates(result, shapes, chunks)):
        if rows.count < 2:
            reason = reason or "it has a single row"
            continue
        try:
            return _Search(head, rows, order).region()
        except Whole as whole:
            reason = str(whole)
    return reason


def _viewed_shapes(node: fx.Node) -> Iterator[tuple[int, ...]]:
    """Shapes of three dims or more in which a value is viewed or cast."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if is_view(user) or user.target is aten._to_copy.default:
                shape = tuple(tensors(user)[0].shape)
                if len(shape) > 2 and shape[-1] == tensors(node)[0].shape[-1]:
                    yield shape
                pending.append(user)


class _Search:
    """The region of a product whose result has some rows."""

    def __init__(self, head: fx.Node, rows: Rows, order: list[fx.Node]) -> None:
        self.head, self.order = head, order
        self.count, self.each = rows.count, tensors(head)[0].shape[-2] // rows.count
        self.carried: dict[fx.Node, Carried] = {}
        self.results: dict[fx.Node, tuple[Carried, ...]] = {}
        self.carriages: dict[fx.Node, Carriage] = {}
        self.wide: set[fx.Node] = set()
        self.expected: dict[fx.Node, Rows] = {}
        self.join(head, rows)

    def region(self) -> Region:
        """The closed region; raises Whole."""
        for phase in ("forward", "backward"):
            own = [node for node in self.order if node.meta["phase"] == phase]
            while self.join_readers(own) or self.join_makers(own) or self.join_between(own):
                pass
        self.check()
        forward, backward = (
            tuple(n for n in self.order if n in self.carried and n.meta["phase"] == phase)
            for phase in ("forward", "backward")
        )
        if not backward:
            raise Whole("no backward reads it")
        wide, carried = frozenset(self.wide), self.carried
        return Region(self.head, self.count, forward, backward, carried, self.carriages, wide)

    # Operators of the region.

    def join_readers(self, nodes: list[fx.Node]) -> bool:
        """Takes in the operators that read wide values."""
        return self.join_all(
            nodes, lambda n: any(x in self.wide or x in self.results for x in n.all_input_nodes)
        )

    def join_between(self, nodes: list[fx.Node]) -> bool:
        """Takes in operators that the region leads to, and that lead to it in turn."""
        within = set(nodes)
        own = [n for n in nodes if n in self.carried]
        before = ancestors(own, within)
        after: set[fx.Node] = set()
        for node in nodes:
            if any(x in after or (x in self.carried and x in within) for x in node.all_input_nodes):
                after.add(node)
        return self.join_all(nodes, lambda n: n in before and n in after)

    def join_all(self, nodes: list[fx.Node], belongs: Callable[[fx.Node], bool]) -> bool:
        before = len(self.carried)
        for node in nodes:
            if node not in self.carried and belongs(node):
                self.join(node)
        return len(self.carried) > before

    def join_makers(self, nodes: list[fx.Node]) -> bool:
        """Takes in operators of this half that make a wide value for the region alone."""
        before = len(self.carried)
        for node in reversed(nodes):
            rows = self.expected.get(node)
            if node in self.carried or rows is None or not self.is_makeable(node):
                continue
            if rows_through(Operator.of(node), [None] * len(operands(node)), rows) is not None:
                self.join(node, rows)
        return len(self.carried) > before

    def is_makeable(self, node: fx.Node) -> bool:
        if node.target in PRODUCTS or is_name(node) or node.target in STARTS or is_random(node):
            return False
        phase = node.meta["phase"]
        alone = all(u in self.carried or u.meta.get("phase") != phase for u in node.users)
        leaves = any(u.op == "output" for u in node.users)
        single = isinstance(node.meta["val"], torch.Tensor)
        return single and alone and not leaves and self.numbers(node, self.expected[node]) > 1

    def join(self, node: fx.Node, result: Rows | None = None) -> None:
        """Takes in an operator; raises Whole if it does not run over the rows."""
        if is_name(node):
            return self.join_name(node)
        if node.meta["phase"] == "forward" and node.target in PRODUCTS and node is not self.head:
            raise self.refusal(node, "is a product of it")
        if is_random(node):
            raise self.refusal(node, "draws random numbers")
        if node.target in STARTS and axis_of_level(axis_of(node)) not in MODEL_AXES:
            raise self.refusal(node, "communicates with ranks that have other rows")
        given = [None if node is self.head else self.rows_of(x, node) for x in operands(node)]
        if result is None and not any(given):
            raise self.refusal(node, "reads no rows")
        carriage = rows_through(Operator.of(node), given, result)
        if carriage is None:
            raise self.refusal(node, "does not take rows apart")
        self.carriages[node] = carriage
        for operand, rows in zip(operands(node), carriage.operands, strict=False):
            if rows is not None and operand not in self.carried:
                self.expect(operand, rows, node)
        if isinstance(node.meta["val"], torch.Tensor):
            self.label(node, carriage.results[0])
        else:
            self.results[node] = carriage.results
            self.carried[node] = None

    def join_name(self, node: fx.Node) -> None:
        """Takes in a wait, or an item of a tuple."""
        source = node.all_input_nodes[0]
        if node.target is getitem:
            return self.label(node, self.results[source][node.args[1]])  # type: ignore[index]
        self.results[node] = self.results[source]
        self.carried[node] = None
        return None

    def rows_of(self, operand: fx.Node, reader: fx.Node) -> Rows | None:
        """The rows of an operand; None if it is read whole, as a sum of the other half is."""
        rows = self.carried.get(operand)
        if isinstance(rows, Rows):
            return rows
        if rows is not None and operand.meta["phase"] == reader.meta["phase"]:
            raise self.refusal(reader, "reads a sum over all rows of it")
        return None

    def expect(self, operand: fx.Node, rows: Rows, reader: fx.Node) -> None:
        """Remembers the rows that a value outside has for its reader."""
        if reader.target in PRODUCTS or operand.op != "call_function":
            return
        if operand.meta["phase"] == reader.meta["phase"]:
            self.expected.setdefault(operand, rows)

    def label(self, node: fx.Node, carried: Carried) -> None:
        """Records what a value has of the rows, and whether it is wide."""
        self.carried[node] = carried
        if not isinstance(carried, Rows):
            return
        maker = node.all_input_nodes[0] if node.target is getitem else node
        if maker.target in PRODUCTS and maker is not self.head:
            return
        # Of several ranks the last may have a single column, and divides like the others.
        keeps_columns = maker.target not in REDUCERS and self.wide.intersection(operands(maker))
        if maker is self.head or keeps_columns or self.numbers(node, carried) > 1:
            self.wide.add(node)

    def numbers(self, node: fx.Node, rows: Carried) -> float:
        """Numbers of a value for each row of the product."""
        assert isinstance(rows, Rows)
        return tensors(node)[0].numel() / (rows.count * self.each)

    # Checks.

    def check(self) -> None:
        """Raises Whole if something outside reads a value that only chunks have."""
        for node in self.carried:
            lost = self.carried[node] == "lost"
            for user in node.users if lost or node in self.wide else ():
                if user.op == "output":
                    raise Whole(f"{node} is returned: {render_node(node)}")
                if lost or user not in self.carried:
                    raise self.refusal(user, f"reads {node} as a whole")
        for node, rows in self.expected.items():
            if self.carried.get(node, rows) != rows:
                raise self.refusal(node, "has its rows in another order")
        draws = [n for n in self.order if is_random(n)]
        if draws and _moved(self.order, self.carried).intersection(draws):
            raise Whole("random numbers are drawn between its operators")

    def refusal(self, node: fx.Node, why: str) -> Whole:
        return Whole(f"{node} {why}: {render_node(node)}")


def _moved(order: Iterable[fx.Node], region: Iterable[fx.Node]) -> set[fx.Node]:
    """Nodes that depend on a region."""
    after = set(region)
    for node in order:
        if any(x in after for x in node.all_input_nodes):
            after.add(node)
    return after
