"""`expand`: replaces the marks of repeated blocks with copies of the traced block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.capture.repeated_blocks import MARK, BlocksDiffer

_APART = 1_000_000
"""Distance between the autograd sequence numbers of one copy and the next."""


def expand(graph: fx.Graph) -> None:
    """Replaces each mark in a joint graph with a copy of the operators of the first equal call.

    Raises:
        BlocksDiffer: a block reads a tensor other than its inputs, or gradients differ.
    """
    marks: dict[tuple[str, int], fx.Node] = {}
    for node in graph.find_nodes(op="call_function", target=MARK):
        marks[node.args[3], node.args[4]] = node
    bodies: dict[int, _Body] = {}
    for (what, number), node in marks.items():
        if what == "repeat":
            first = _indices(node)[0]
            if first not in bodies:
                bodies[first] = _Body(graph, marks, first)
            bodies[first].copy(graph, number, node, marks.get(("repeat_back", number)))
    for (what, _), node in reversed(marks.items()):
        if not what.startswith("repeat"):
            for user in list(node.users):
                user.replace_all_uses_with(_inputs(node)[user.args[1]])  # type: ignore[index]
    graph.eliminate_dead_code()


class _Body:
    """The operators between the marks of a traced call."""

    def __init__(
        self, graph: fx.Graph, marks: Mapping[tuple[str, int], fx.Node], number: int
    ) -> None:
        self.enter, self.leave = marks["enter", number], marks["leave", number]
        self.enter_back = marks.get(("enter_back", number))
        self.leave_back = marks.get(("leave_back", number))
        ends = [*_inputs(self.leave), *(_inputs(self.enter_back) if self.enter_back else ())]
        inside: set[fx.Node] = set()
        while ends:
            node = ends.pop()
            source = node.args[0] if node.args else None
            is_border = source is not None and source in (self.enter, self.leave_back)
            if node in inside or node.op == "get_attr" or is_border:
                continue  # a border is an input of the block, or a gradient of an output
            if node.op != "call_function" or node.target is MARK:
                raise BlocksDiffer(f"a block reads {node.name}, which is not an input of it")
            inside.add(node)
            ends += node.all_input_nodes
        order = [node for node in graph.nodes if node in inside]
        self.forward = [node for node in order if not _is_backward(node)]
        self.backward = [node for node in order if _is_backward(node)]

    def copy(self, graph: fx.Graph, number: int, call: fx.Node, back: fx.Node | None) -> None:
        made = _paired(self.enter, call)
        block = call.meta["custom"]["module"]
        old = self.enter.meta["custom"]["module"]

        def copied(nodes: Sequence[fx.Node], before: fx.Node) -> None:
            with graph.inserting_before(before):
                for node in nodes:
                    made[node] = graph.node_copy(node, lambda n: made.get(n, n))
                    meta = made[node].meta = dict(node.meta)
                    if note := meta.get("custom"):
                        own = block + note["module"].removeprefix(old)
                        meta["custom"] = note | {"module": own}
                    if meta.get("seq_nr") is not None:
                        # Backward operators get their line and block from the forward operator
                        # of this number, so no two copies may share one.
                        meta["seq_nr"] += number * _APART

        copied(self.forward, call)
        _replace(call, [made.get(node, node) for node in _inputs(self.leave)])
        if back is None:
            return
        indices = _indices(back)
        middle = indices.index(-1)
        if self.leave_back is None or self.enter_back is None:
            raise BlocksDiffer("the first of equal blocks has no backward")
        if indices[:middle] != _indices(self.leave_back):
            raise BlocksDiffer("gradients enter equal blocks by different results")
        made |= _paired(self.leave_back, back)
        copied(self.backward, back)
        known = dict(zip(_indices(self.enter_back), _inputs(self.enter_back), strict=True))
        inputs = [known.get(index) for index in indices[middle + 1 :]]
        _replace(back, [made.get(node, node) if node else None for node in inputs])


def _replace(mark: fx.Node, results: Sequence[fx.Node | None]) -> None:
    for user, result in zip(_results(mark), results, strict=True):
        if user is None or not user.users:
            continue
        # No operator reads a gradient that is only returned, so its strides may differ.
        returned = all(reader.op == "output" for reader in user.users)
        if result is None and returned:
            for reader in list(user.users):
                reader.args = fx.map_arg(reader.args, _without(user))
        elif result is None or (_strides(user) != _strides(result) and not returned):
            raise BlocksDiffer("the gradients of equal blocks differ")
        else:
            user.replace_all_uses_with(result)


def _without(gone: fx.Node) -> Callable[[fx.Node], Any]:
    return lambda node: None if node is gone else node


def _strides(node: fx.Node) -> object:
    return (node.meta["val"].shape, node.meta["val"].stride())


def _results(mark: fx.Node) -> list[fx.Node | None]:
    """The getitem node of each result of a mark, None if there is none."""
    found: list[fx.Node | None] = [None] * len(mark.args[1])  # type: ignore[arg-type]
    for user in mark.users:
        found[user.args[1]] = user  # type: ignore[index]
    return found


def _paired(mark: fx.Node, other: fx.Node) -> dict[fx.Node, fx.Node]:
    """Maps inputs of the traced call to inputs of another call."""
    pairs = zip(_results(mark), _inputs(other), strict=True)
    return {inner: outer for inner, outer in pairs if inner is not None}


def _indices(mark: fx.Node) -> list[int]:
    return list(mark.args[2])  # type: ignore[arg-type]


def _inputs(mark: fx.Node) -> list[fx.Node]:
    return list(mark.args[0])  # type: ignore[arg-type]


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"
