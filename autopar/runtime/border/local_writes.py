"""`warn_of_local_writes`: attributes of a model that get one rank's rows."""

from __future__ import annotations

from torch import nn

from autopar._torch import pytree
from autopar.capture.trace import Capture
from autopar.core.common.notices import warn_once
from autopar.core.ir.roles import Output
from autopar.errors import NumericsWarning


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
