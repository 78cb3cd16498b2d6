"""`ShardParameters`: parameters sharded between steps and gathered before their use (ZeRO)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.ir.graph import GraphProperty, ParameterInfo, TrainingGraph
from autopar.ir.placement import Placement, Replicate, Shard, chunk_rows
from autopar.ir.roles import Parameter
from autopar.passes.core.collective_ops import annotate, collective, start_all_gather
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
        graph = graph.copy()
        roles = zip(graph.inputs, graph.placeholders, strict=True)
        nodes = {graph.parameters[r.name]: n for r, n in roles if isinstance(r, Parameter)}
        used = {info: nodes[info] for info in sharded if info in nodes}
        for info, node in used.items():
            if stages[info.block] == 3:
                recompute_derived(graph, node, frozenset(nodes.values()))
        stay_gathered = last_used(nodes)
        for info, node in used.items():
            regather = stages[info.block] == 3 and info not in stay_gathered
            self.shard(graph, node, info, regather=regather)
        dims = dict(self.dims)
        own = {info.name: Shard(dims.get(info.name, 0)) for info in sharded}
        layouts = {**graph.layouts, **own}
        return PassResult(replace(graph, layouts=layouts))

    def shard(
        self, graph: TrainingGraph, node: fx.Node, info: ParameterInfo, *, regather: bool
    ) -> None:
        """Shards an input and writes one gather, or one for each phase."""
        users = sorted(node.users)
        dim, local = dict(self.dims).get(info.name, 0), list(info.shape)
        local[dim] = chunk_rows(info.shape[dim], graph.axes[self.axis])[self.rank]
        node.meta["val"] = node.meta["val"].new_empty(local)
        node.meta["placement"] = Shard(dim)
        groups = [users]
        if regather:
            groups = [[u for u in users if u.meta["phase"] == p] for p in ("forward", "backward")]
        for group in filter(None, groups):
            graph.graph.inserting_before(group[0])
            like = group[0] if group[0].op != "output" else node
            front = swapped(graph.graph, like, node, dim, Shard(0))
            (full,) = collective(
                graph.graph, like, start_all_gather, [front], [info.shape[dim]], self.axis
            )
            full.meta["gathered"] = info.name
            annotate([full], placement=Replicate())
            full = swapped(graph.graph, like, full, dim, Replicate())
            for user in group:
                user.replace_input_with(node, full)


def swapped(
    graph: fx.Graph, like: fx.Node, node: fx.Node, dim: int, placement: Placement
) -> fx.Node:
    """A copy whose first dim is `dim`, since collectives divide the first; its own inverse."""
    if not dim:
        return node
    made = call(graph, like, aten.transpose_copy.int, node, 0, dim)
    made.meta["placement"] = placement
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
        if is_forward and constant and not is_random(node):
            derived.add(node)
            todo.extend(node.users)
    readers = {user for node in derived for user in node.users}
    backward = (u for u in readers if u.meta["phase"] == "backward" and u.op != "output")
    recompute(graph.graph, sorted(backward), derived.__contains__)
