"""Activation checkpointing: keeps or recomputes the forward values that the backward reads.

Otherwise all of these values are in memory when the backward begins. A minimum cut finds the fewest
bytes to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.roles import Update
from autopar.core.operators.attention import attention
from autopar.core.operators.attention_blocks import attention_block
from autopar.core.operators.experts import expert_mm
from autopar.core.plan.recompute import ALL_LEVELS, LEVELS, Level
from autopar.passes.core.collective_ops import STARTS, start_all_gather, wait
from autopar.passes.core.node_builder import aten, is_random, is_view, recompute
from autopar.passes.core.pass_base import Pass, PassResult

ATTENTION = frozenset(
    {
        attention,
        attention_block,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operators that level "full" never recomputes either."""

EXPENSIVE = ATTENTION | frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_attention_math_for_mps.default,
        aten.sort.default,
        aten.topk.default,
        aten.cumsum.default,
        expert_mm,
    }
)
"""Operators that level "selective" never recomputes."""

FUSED = frozenset(
    {aten.clone.default, aten._to_copy.default, aten.full.default, aten.scalar_tensor.default}
)
"""Operators, besides pointwise ones, that a compiler fuses into their users."""


@dataclass(frozen=True)
class CheckpointActivations(Pass):
    """Recomputes forward values in the backward instead of keeping them.

    Before: the backward of a joint graph reads any forward value. After: the backward reads the
    values in a minimum cut by bytes, and recomputes others right before their first use. Random
    operators never run again. Collectives do at level "everything", and all-gathers at each but
    "none"; at "selective" and "full" only if ranks have parts of one size. Tier: exact.

    | level | recomputes |
    |---|---|
    | "none" | views only |
    | "regather" | also results of all-gathers, as Megatron's sequence parallelism does |
    | "selective" | also all but `EXPENSIVE` operators, such as matrix products |
    | "full" | all inside a block but attention and the values that other blocks read |
    | "everything" | as "full", with attention and collectives, as torch.utils.checkpoint does |

    Outside of blocks, "full" and "everything" keep the results of `EXPENSIVE` operators.

    Attributes:
        level: level of all blocks, or (block, level) pairs; "" is the code outside of blocks.
        budget: greatest size of kept values in bytes, None for no limit. The pass raises the level
            of one block after the other until the values fit.
        fuses: whether a compiler fuses operators; fused ones are recomputed even at level "none".
    """

    level: Level | tuple[tuple[str, Level], ...] = "none"
    budget: int | None = None
    fuses: bool = False

    def __call__(self, graph: TrainingGraph) -> PassResult:
        if graph.backward_start.op == "output":
            return PassResult(graph, "there is no backward")
        blocks = ["", *dict.fromkeys(p.block for p in graph.parameters.values() if p.block)]
        levels: dict[str, Level] = dict.fromkeys(blocks, "none")
        levels |= dict.fromkeys(blocks, self.level) if isinstance(self.level, str) else self.level
        if self.budget is None and set(levels.values()) == {"none"} and not self.fuses:
            return PassResult(graph, "everything is kept")
        kept = MinCut(graph, levels, self.fuses).kept()
        for level, block in product(LEVELS[1:], [*blocks[1:], ""]):
            if self.budget is None or storage_bytes(kept) <= self.budget:
                break
            if ALL_LEVELS.index(level) > ALL_LEVELS.index(levels[block]):
                levels[block] = level
                kept = MinCut(graph, levels, self.fuses).kept()
        if set(levels.values()) == {"none"} and not self.fuses:
            return PassResult(graph, "everything is kept, within the budget")
        changed = replace(graph, disposable=False).copy()  # a decline returns `graph` unchanged
        nodes, names = list(changed.graph.nodes), {node.name for node in kept}
        backward = nodes[nodes.index(changed.backward_start) : -1]
        again = recompute(
            changed.graph,
            backward,
            lambda node: _is_forward_value(node) and node.name not in names,
            recomputed=True,
        )
        if all(map(is_view, again)):
            return PassResult(graph, "nothing cheap enough is kept")
        return PassResult(changed)


class MinCut:
    """Minimum cut, by bytes, between the forward's inputs and the backward's uses."""

    def __init__(self, graph: TrainingGraph, levels: Mapping[str, Level], fuses: bool) -> None:
        nodes = list(graph.graph.nodes)
        self.nodes = nodes[: nodes.index(graph.backward_start)]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.levels, self.fuses, self.is_uneven = levels, fuses, graph.is_uneven
        changed = {role.of for role in graph.outputs if isinstance(role, Update)}
        roles = zip(graph.placeholders, graph.inputs, strict=True)
        self.changed = {node for node, role in roles if role in changed}
        for node in self.nodes:
            if is_view(node) and node.all_input_nodes[0] in self.changed:
                self.changed.add(node)

    def kept(self) -> list[fx.Node]:
        """Values to keep, in graph order."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        count = len(self.nodes)
        source, sink = 2 * count, 2 * count + 1
        # scipy silently casts capacities to int32: scaled sizes sum to less than `infinite`.
        unit = 1 + sum(map(_size, self.nodes)) // 2**28
        infinite = 2**30
        edges: dict[tuple[int, int], int] = {}
        for node, i in self.index.items():
            edges[2 * i, 2 * i + 1] = self.price(node, unit, infinite)
            if node.op == "placeholder" or self.fixed(node):
                edges[source, 2 * i] = infinite
            for user in node.users:
                j = self.index.get(user)
                end = sink if j is None else 2 * j
                if user.op != "output":
                    edges[2 * i + 1, end] = infinite
        ends, size = np.array(list(edges), dtype=np.int32).T, 2 * count + 2
        prices = np.array(list(edges.values()), dtype=np.int32)
        capacity = csr_array((prices, tuple(ends)), shape=(size, size))
        flow = maximum_flow(capacity, source, sink).flow
        residual = csr_array(capacity - flow)
        residual.data = (residual.data > 0).astype(np.int32)
        residual.eliminate_zeros()
        reached = set(breadth_first_order(residual, source, return_predecessors=False).tolist())
        return [
            node
            for node, i in self.index.items()
            if node.op != "placeholder" and 2 * i in reached and 2 * i + 1 not in reached
        ]

    def price(self, node: fx.Node, unit: int, infinite: int) -> int:
        """Cost of keeping a value: 0 for inputs, `infinite` for tuples, else by bytes."""
        if node.op == "placeholder":
            return 0
        if isinstance(node.meta["val"], (tuple, list)):
            return infinite
        written = 2 if self.fuses and _is_fused(node) else 1  # fusion saves the write
        return 1 + written * _size(node) // unit

    def fixed(self, node: fx.Node) -> bool:
        """Whether a value must not be recomputed."""
        if node.op == "get_attr":
            return False
        maker = node
        while _is_getitem(maker):
            maker = maker.all_input_nodes[0]
        level = self.levels.get(node.meta["block"], "none")
        sent = maker.target in STARTS or maker.target is wait
        # Ranks with other sizes weigh values differently, and must not gather others again.
        gathers = level == "regather" or (level != "none" and not self.is_uneven)
        again = level == "everything" or (gathers and _is_gathered(maker))
        if is_random(maker) or (sent and not again):
            return True
        if any(n in self.changed for n in node.all_input_nodes):
            return True  # the input is updated before the backward
        if level in ("none", "regather"):
            fused = self.fuses and _is_fused(maker) and not _leaves_block(node)
            return not (again or fused or is_view(node))
        if level == "selective" or not node.meta["block"]:
            return maker.target in EXPENSIVE
        is_attention = level == "full" and maker.target in ATTENTION
        return is_attention or _leaves_block(node)


def _leaves_block(node: fx.Node) -> bool:
    return any(
        user.meta["phase"] == "forward" and user.meta["block"] != node.meta["block"]
        for user in node.users
        if user.op != "output"
    )


def _is_gathered(node: fx.Node) -> bool:
    """Whether a node is an all-gather, its wait, or a copy or view of its result."""
    through = (wait, aten.clone.default, aten.cat.default)
    while node.target in through or is_view(node) or _is_getitem(node):
        first = node.args[0][0] if isinstance(node.args[0], (list, tuple)) else node.args[0]
        if not isinstance(first, fx.Node):
            return False
        node = first
    return node.target is start_all_gather


def _is_fused(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in FUSED


def _is_forward_value(node: fx.Node) -> bool:
    return node.op == "call_function" and node.meta["phase"] == "forward"


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _size(node: fx.Node) -> int:
    return sum(map(tensor_bytes, tensors(node)))


def storage_bytes(nodes: Iterable[fx.Node]) -> int:
    """Bytes of the storages behind some values, without inputs."""
    return sum(_size(node) for node in {_storage(n) for n in nodes} if node.op != "placeholder")


def _storage(node: fx.Node) -> fx.Node:
    while is_view(node) or (_is_getitem(node) and is_view(node.all_input_nodes[0])):
        node = node.all_input_nodes[0]
    return node
