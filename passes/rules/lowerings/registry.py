"""Custom lowerings: programs for operators that shards alone do not compute.

Each has loops, like a rule, and writes a program of plain operators and small collectives that one
rank runs instead of the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensorMode, OpOverload, pytree
from autopar.core.ir.placement import OpStrategy
from autopar.passes.core.collective_ops import STARTS, kind_of, message_bytes
from autopar.passes.rules.local_args import local_shape
from autopar.passes.rules.loops import Loop, Operator, Rule, overloads
from autopar.passes.rules.lowerings import (
    attention,
    embedding,
    experts,
    losses,
    norms,
    random,
    ring_attention,
    scan,
    softmax,
)
from autopar.passes.rules.lowerings.context import LoweringContext


@dataclass(frozen=True)
class CustomLowering:
    """Operators, the rule of their loops, and the writer of one rank's program and results."""

    targets: tuple[OpOverload, ...]
    rule: Rule
    lower: Callable[[LoweringContext], Sequence[fx.Node | None]]

    def traffic(
        self, operator: Operator, op_strategy: OpStrategy, ranks: int
    ) -> tuple[tuple[str, int], ...]:
        """Kind and message size in bytes of each collective, in order."""
        nodes = program(operator, op_strategy, ranks, 0).nodes
        return tuple((kind_of(n), message_bytes(n)) for n in nodes if n.target in STARTS)


FAMILIES: Any = (
    attention, embedding, experts, losses, softmax, norms, scan, random, ring_attention,
)  # fmt: skip

OPTIONAL = frozenset(ring_attention.LOWERINGS)
"""Custom lowerings that are not offered unless asked for."""

CUSTOM_LOWERINGS: Mapping[str, CustomLowering] = {
    name: CustomLowering(overloads(names), rule, lower)
    for family in FAMILIES
    for name, (names, rule, lower) in family.LOWERINGS.items()
}
"""Every custom lowering, by name, from the texts of its operators, its rule and its writer."""


def lower(ctx: LoweringContext) -> list[fx.Node | None]:
    """Writes the program of one rank for an operator; returns a node for each of its results."""
    return list(CUSTOM_LOWERINGS[ctx.op_strategy.lowering].lower(ctx))


def lowering_loops(operator: Operator, also: Container[str] = ()) -> list[Loop]:
    """The loops of an operator that custom lowerings split; of optional ones, those of `also`."""
    return [
        replace(loop, lowering=name)
        for name, lowering in CUSTOM_LOWERINGS.items()
        if operator.target in lowering.targets and (name not in OPTIONAL or name in also)
        for loop in lowering.rule(operator)
    ]


def program(
    operator: Operator, op_strategy: OpStrategy, ranks: int, rank: int, axis: str = "axis"
) -> fx.Graph:
    """The program of one rank for a lowered operator alone, with a placeholder for each operand."""
    operator = _on_fake_tensors(operator)
    graph = fx.Graph()
    like = fx.Graph().call_function(operator.target)
    like.meta = {"phase": "forward", "block": "", "source": None}
    shards: list[fx.Node] = []
    for tensor, placement in zip(operator.operands, op_strategy.operands, strict=True):
        node = graph.placeholder(f"operand_{len(shards)}")
        shape = local_shape(tensor.shape, placement, ranks, rank)
        node.meta = {**like.meta, "val": tensor.new_empty(shape)}
        shards.append(node)
    ctx = LoweringContext(graph, like, operator, op_strategy, tuple(shards), ranks, rank, axis)
    graph.output(lower(ctx))
    return graph


def _on_fake_tensors(operator: Operator) -> Operator:
    modes = (getattr(t, "fake_mode", None) for t in operator.operands)
    mode = next(filter(None, modes), None) or FakeTensorMode()

    def fake(leaf: Any) -> Any:
        is_real = isinstance(leaf, torch.Tensor) and not hasattr(leaf, "fake_mode")
        return mode.from_tensor(leaf) if is_real else leaf

    parts = (operator.args, operator.kwargs, operator.results)
    return Operator(operator.target, *pytree.tree_map(fake, parts))
