"""`early_gradients`: a region's gradients but for one factor, known before the backward begins.

A gradient is linear in that of the loss, so the forward can compute it for 1, while a chunk's
logits are there. Otherwise the backward computes the logits again, a third of the product's work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.core.ir.graph import operands, tensors
from autopar.core.ir.placement import Partial
from autopar.passes.chunks.row_search import Region
from autopar.passes.core.collective_ops import is_name
from autopar.passes.core.node_builder import aten
from autopar.passes.rules.loops import Operator
from autopar.passes.rules.operators.partial_linear import linear_strategies

FIRST = frozenset((aten.nll_loss_backward.default, aten._to_copy.default))
"""Further operators that are linear in their first tensor, the second one but for rounding."""


@dataclass(frozen=True)
class EarlyGradients:
    """The number of a backward that scales all gradients of a region in it.

    Attributes:
        scale: the number, a tensor without dims.
        inputs: nodes from the number to the region, and constants, in order; they run once.
        scaled: values of the region that are multiples of the number.
    """

    scale: fx.Node
    inputs: tuple[fx.Node, ...]
    scaled: frozenset[fx.Node]


def early_gradients(region: Region, order: Sequence[fx.Node]) -> EarlyGradients | None:
    """The number that scales a region's gradients; None if there is no single one."""
    scales, inputs = _entries(region)
    if len(scales) != 1 or not _are_ready(region, inputs, order):
        return None
    (scale,) = scales
    if tensors(scale)[0].dim():
        return None
    before = tuple(node for node in order if node in inputs)
    scaled = {scale}
    for node in (*before, *region.backward):
        dependent = [operand in scaled for operand in operands(node)]
        if any(dependent):
            if not _is_linear(node, dependent):
                return None
            scaled.add(node)
    return EarlyGradients(scale, before, frozenset(scaled))


def _entries(region: Region) -> tuple[set[fx.Node], set[fx.Node]]:
    """Numbers and tangents that a region's backward depends on, and operators between."""
    own, scales, inputs = set(region.backward), set[fx.Node](), set[fx.Node]()
    pending = [x for node in region.backward for x in node.all_input_nodes if x not in own]
    while pending:
        node = pending.pop()
        if node.meta["phase"] != "backward" or node in inputs:
            continue
        value = node.meta["val"]
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        if node.op == "placeholder" or (is_number and node.all_input_nodes):
            scales.add(node)
        else:
            inputs.add(node)
            pending += node.all_input_nodes
    return scales, inputs


def _are_ready(region: Region, inputs: set[fx.Node], order: Sequence[fx.Node]) -> bool:
    """Whether all that the gradients read is there when a chunk of the forward has run."""
    position = {node: place for place, node in enumerate(order)}
    own, last = {*region.forward, *region.backward}, position[region.forward[-1]]
    late = set(region.forward)
    for node in order:
        if any(x in late for x in node.all_input_nodes):
            late.add(node)
    for node, operand in _reads(region, inputs):
        if operand in own and node not in inputs:
            if region.carried[operand] == "sum":
                return False  # each chunk has a part of it alone
        elif operand.meta["phase"] == "forward" and (operand in late or position[operand] > last):
            return False
    return not any(t.dtype == torch.float16 for n in region.backward for t in tensors(n))


def _reads(region: Region, inputs: set[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    own = set(region.backward)
    for node in (*inputs, *region.backward):
        for operand in node.all_input_nodes:
            if operand not in own:
                yield node, operand


def _is_linear(node: fx.Node, dependent: Sequence[bool]) -> bool:
    if is_name(node):
        return True
    operator = Operator.of(node)
    if node.target in FIRST:
        is_float = all(t.dtype.is_floating_point for t in tensors(node))
        return bool(is_float and dependent[0] and not any(dependent[1:]))
    return any(
        [isinstance(placement, Partial) for placement in strategy.operands] == list(dependent)
        for strategy in linear_strategies(operator)
    )
