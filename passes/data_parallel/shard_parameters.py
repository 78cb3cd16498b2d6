"""`ShardParameters`: parameters sharded between steps and gathered before their use (ZeRO).

In mixed precision, a replicated parameter with its gradient and optimizer states takes 16 bytes on
every rank. Sharded over n ranks, 16 / n remain between steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.core.ir.graph import GraphProperty, ParameterInfo, TrainingGraph
from autopar.core.ir.placement import Replicate, Shard, chunk_of
from autopar.core.ir.roles import Parameter
from autopar.passes.core.collective_ops import (
    annotate,
    collective,
    start_all_gather,
    tagged,
)
from autopar.passes.core.node_builder import aten, call, is_random, recompute
from autopar.passes.core.pass_base import Pass, PassResult


@dataclass(frozen=True)
class ShardParameters(Pass):
    """Shards the parameters of each block over an axis by its ZeRO stage.

    Before: parameters are replicated. After: stages 1 and 2 shard trained parameters, and stage 3
    shards all, on dim 0 or one that divides more evenly. A gather precedes the first use of each.
    Stage 3 gathers again for the backward and recomputes values that depend on parameters alone, so
    no unsharded parameter outlives its phase. Parameters that the forward uses last stay gathered,
    since the backward needs them first. Tier: exact.

    Attributes:
        axis: name of the mesh axis.
        rank: this rank's coordinate on the axis.
        stages: ZeRO stage of each block; block "" has all parameters outside of blocks.
        dims: parameters that are sharded on another dim than 0, and that dim.
    """

    axis: str
    rank: int
    stages: tuple[tuple[str, int], ...]
    dims: tuple[tuple[str, int], ...] = ()
    ensures = frozenset({GraphProperty.PARAMETERS_SHARDED})

    def __call__(self, graph: TrainingGraph) -> PassResult:
        stages = dict(self.stages)
        sharded = [p for p in graph.parameters.values() if is_sharded(p, stages[p.block])]
        if not sharded:
            return PassResult(graph, "every block is stage 0: parameters stay whole")
        graph, dims = graph.copy(), dict(self.dims)
        chunks = {
            info.name: Chunk(dims.get(info.name, 0), self.axis, self.rank) for info in sharded
        }
        for info, node in parameter_inputs(graph).items():
            if info.name in chunks:
                node.meta["placement"] = Shard(chunks[info.name].dim)
        shard_inputs(graph, chunks, stages)
        shards = {name: Shard(chunk.dim) for name, chunk in chunks.items()}
        return PassResult(replace(graph, layouts={**graph.layouts, **shards}))


@dataclass(frozen=True)
class Chunk:
    """A rank's chunk of a parameter: the sharded dim, the axis, and the coordinate on it."""

    dim: int
    axis: str
    rank: int

    def rows(self, graph: TrainingGraph, info: ParameterInfo) -> int:
        """Size of the dim on this rank."""
        return chunk_of(info.shape[self.dim], graph.axes[self.axis], self.rank)[1]

    def shape(self, graph: TrainingGraph, info: ParameterInfo) -> tuple[int, ...]:
        """Shape of the chunk."""
        before, after = info.shape[: self.dim], info.shape[self.dim + 1 :]
        return (*before, self.rows(graph, info), *after)


def parameter_inputs(graph: TrainingGraph) -> dict[ParameterInfo, fx.Node]:
    """The input of each parameter that the graph reads."""
    roles = zip(graph.inputs, graph.placeholders, strict=True)
    return {graph.parameters[r.name]: node for r, node in roles if isinstance(r, Parameter)}


def shard_inputs(
    graph: TrainingGraph, chunks: Mapping[str, Chunk], stages: Mapping[str, int]
) -> None:
    """Makes parameters chunks, and gathers them before their uses by the stage of their block."""
    nodes = parameter_inputs(graph)
    used = {info: node for info, node in nodes.items() if info.name in chunks}
    for info, node in used.items():
        if stages[info.block] == 3:
            recompute_derived(graph, node, frozenset(nodes.values()))
    stay_gathered = last_used(nodes)
    for info, node in used.items():
        regather = stages[info.block] == 3 and info not in stay_gathered
        write_gathers(graph, node, info, chunks[info.name], regather=regather)


def write_gathers(
    graph: TrainingGraph, node: fx.Node, info: ParameterInfo, chunk: Chunk, *, regather: bool
) -> None:
    """Makes an input the chunk of a parameter, and writes one gather or one for each phase."""
    users, stored = sorted(node.users), node.meta.get("placement")
    node.meta["val"] = node.meta["val"].new_empty(chunk.shape(graph, info))
    groups = [users]
    if regather:
        groups = [[u for u in users if u.meta["phase"] == p] for p in ("forward", "backward")]
    for group in filter(None, groups):
        graph.graph.inserting_before(group[0])
        like = group[0] if group[0].op != "output" else node
        front = swapped(graph.graph, like, node, chunk.dim)
        if isinstance(stored, Shard):
            front.meta["placement"] = Shard(0)
        rows = [info.shape[chunk.dim]]
        (full,) = collective(graph.graph, like, start_all_gather, [front], rows, chunk.axis)
        full.meta["gathered"] = info.name
        if stored is not None:
            annotate([full], placement=Replicate())
        full = swapped(graph.graph, like, full, chunk.dim)
        for user in group:
            user.replace_input_with(node, full)


def swapped(graph: fx.Graph, like: fx.Node, node: fx.Node, dim: int) -> fx.Node:
    """A copy whose first dim is `dim`, since collectives divide the first; its own inverse."""
    if not dim:
        return node
    made = call(graph, like, aten.transpose_copy.int, node, 0, dim)
    if "placement" in node.meta:
        made.meta["placement"] = node.meta["placement"]
    return made


def last_used(parameters: Mapping[ParameterInfo, fx.Node]) -> set[ParameterInfo]:
    """Parameters that the forward uses last, such as those of a head or a last norm.

    The backward needs them first, so gathering them again would free no memory in between.
    """
    last = {
        info: max(uses)
        for info, node in parameters.items()
        if (uses := [u for u in node.users if u.meta["phase"] == "forward" and u.op != "output"])
    }
    if not last:
        return set()
    block = max(last, key=lambda info: last[info]).block
    others = [node for info, node in last.items() if info.block != block]
    in_block = {info: node for info, node in last.items() if info.block == block}
    return {info for info, node in in_block.items() if all(other < node for other in others)}


def is_sharded(info: ParameterInfo, stage: int) -> bool:
    """Whether a parameter is sharded between steps under a ZeRO stage."""
    return bool(info.shape) and (stage == 3 or (stage > 0 and info.requires_grad))


def recompute_derived(
    graph: TrainingGraph, parameter: fx.Node, parameters: Collection[fx.Node]
) -> None:
    """Recomputes in the backward the forward values of a parameter, and of parameters alone."""
    derived, todo = set[fx.Node](), list(parameter.users)
    while todo:
        node = todo.pop()
        is_forward = node.op == "call_function" and node.meta["phase"] == "forward"
        constant = all(n in derived or n in parameters for n in node.all_input_nodes)
        # gathers of ZeRO along another axis: `last_used` decided whether there is another
        is_gather = node.target is start_all_gather and tagged(node, "gathered")
        if is_forward and constant and not is_random(node) and not is_gather:
            derived.add(node)
            todo.extend(node.users)
    readers = {user for node in derived for user in node.users}
    backward = (u for u in readers if u.meta["phase"] == "backward" and u.op != "output")
    # Readers are sorted so that each recomputed value precedes all of them.
    recompute(graph.graph, sorted(backward), derived.__contains__)
