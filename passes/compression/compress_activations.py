"""Casts messages between partitions and stages to a narrower floating type.

Compute awaits redistributions at their first use, so that little hides their bytes. A cast to bf16
halves those of float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import OutputRole, StageInput, StageOutput
from autopar.core.plan.compression import Compression
from autopar.passes.compression.codecs import NARROW
from autopar.passes.core.collective_ops import axis_of, op_of, results_of, starts, wait_of
from autopar.passes.core.node_builder import aten, call, value
from autopar.passes.core.pass_base import Pass, PassResult

WIDTH = 16
"""Least size of the last dim to cast; narrower tensors are statistics, such as softmax sums."""


@dataclass(frozen=True)
class CompressActivations(Pass):
    """Casts collectives of partitioned axes, and messages between stages, to a narrow type.

    Before: collectives of partitioned axes and messages between stages have the model's own types.
    After: floating matrices are cast to the narrow type before they are sent, and back afterwards.
    Sums over the ranks of an axis accumulate in the narrow type, "bf16" or "fp16". Tier: lossy.
    """

    compression: str
    tier = "lossy"

    def __call__(self, graph: TrainingGraph) -> PassResult:
        narrow = NARROW[Compression.of(self.compression).method]
        graph = graph.copy()
        done = [
            _cast_collective(graph, start, narrow)
            for start in list(starts(graph))
            if axis_of(start) in graph.partitioned and op_of(start) == "sum"
        ]
        received = [
            _cast_received(graph, node, role.phase, narrow)
            for role, node in zip(graph.inputs, graph.placeholders, strict=True)
            if isinstance(role, StageInput)
        ]
        sent: dict[OutputRole, fx.Node | None] = {}
        for output, node in zip(graph.outputs, graph.results, strict=True):
            if isinstance(output, StageOutput) and node is not None and _is_wide([node], narrow):
                graph.graph.inserting_after(node)
                sent[output] = _cast(graph.graph, node, node, narrow)
        found = any(done) or any(received) or bool(sent)
        return PassResult(graph.with_results(sent), "" if found else "nothing wide is sent")


def _is_wide(nodes: Iterable[fx.Node], narrow: torch.dtype) -> bool:
    """Whether all values are matrices of a wider floating type."""
    return all(
        t.is_floating_point()
        and t.itemsize > narrow.itemsize
        and t.dim() > 1
        and t.shape[-1] >= WIDTH
        for node in nodes
        for t in tensors(node)
    )


def _cast_collective(graph: TrainingGraph, start: fx.Node, narrow: torch.dtype) -> bool:
    given: list[fx.Node] = list(start.args[0])  # type: ignore[arg-type]
    if not _is_wide(given, narrow):
        return False
    wide = tensors(given[0])[0].dtype
    graph.graph.inserting_before(start)
    start.args = ([_cast(graph.graph, start, node, narrow) for node in given], *start.args[1:])
    start.meta["val"] = start.target(*value(start.args), **value(start.kwargs))  # type: ignore[operator]
    done, results = wait_of(start), results_of(start)
    done.meta["val"] = list(start.meta["val"])
    for result, fake in zip(results, done.meta["val"], strict=True):
        if result is not None:
            result.meta["val"] = fake
            graph.graph.inserting_after(result)
            _widen(graph.graph, result, result, wide)
    return True


def _cast_received(graph: TrainingGraph, node: fx.Node, phase: str, narrow: torch.dtype) -> bool:
    if not _is_wide([node], narrow) or not node.users:
        return False
    (fake,) = tensors(node)
    node.meta["val"] = fake.to(narrow)
    users = [user for user in node.users if user.op != "output"]
    at_once = phase == "forward" and any(
        user.op == "output" or user.meta["phase"] == "forward" for user in node.users
    )
    place = min([next(graph.calls(), graph.output_node) if at_once else graph.output_node, *users])
    graph.graph.inserting_before(place)
    wide = _widen(graph.graph, place, node, fake.dtype)
    wide.meta["phase"] = "forward" if at_once else "backward"
    return True


def _cast(graph: fx.Graph, like: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    cast = call(graph, like, aten._to_copy.default, node, dtype=dtype)
    cast.meta |= {key: node.meta[key] for key in ("placement", "batch_dims") if key in node.meta}
    return cast


def _widen(graph: fx.Graph, like: fx.Node, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    cast = _cast(graph, like, node, dtype)
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)
    return cast
