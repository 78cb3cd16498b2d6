"""Writes the Python attributes that forward assigns, after each call."""

from __future__ import annotations

from typing import Any

from torch import nn

from autopar._torch import pytree
from autopar.capture.trace import Capture
from autopar.common.notices import warn_once
from autopar.errors import NumericsWarning
from autopar.ir.roles import Output


def result_of(capture: Capture, leaves: list[Any], model: nn.Module) -> Any:
    """The model's result from its flattened outputs; writes the assigned attributes."""
    result = pytree.tree_unflatten(leaves, capture.structure)
    if capture.writes:
        result, values = result
        for write, value in zip(capture.writes, values, strict=True):
            write.apply(model, value)
    return result


def warn_of_local_writes(capture: Capture, model: nn.Module) -> None:
    """Warns of attributes that hold this rank's rows, but the whole batch on one device."""
    if not capture.writes:
        return
    indices = pytree.tree_unflatten(list(range(len(capture.leaves))), capture.structure)[1]
    nodes_by_role = dict(zip(capture.graph.outputs, capture.graph.results, strict=True))
    for write, index_tree in zip(capture.writes, indices, strict=True):
        nodes = (nodes_by_role.get(Output(index)) for index in pytree.tree_leaves(index_tree))
        if any(any(node.meta.get("batch_dims", ())) for node in nodes if node is not None):
            warn_once(
                NumericsWarning,
                f"{write.path} of {type(model).__name__} gets this rank's rows at every call; on "
                "one device it would get those of the whole batch. Return it instead.",
            )
