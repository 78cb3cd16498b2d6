"""`split_gathers` and `split_reductions`: messages of a stage beside its waits for other stages.

A stage that starts its gathers when its input has come, and sends a gradient only when its own are
reduced, puts the messages of all stages one behind the other: at pp 8 the step is longer by 12
times one stage's messages.
"""

from __future__ import annotations

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import (
    InputRole,
    OutputRole,
    Parameter,
    Saved,
    StageOutput,
    UnshardedParam,
)
from autopar.passes.core.collective_ops import WAIT_LOWERED, is_lowered_start
from autopar.passes.core.node_builder import ancestors, extract

Results = dict[OutputRole, fx.Node | None]


def split_gathers(forward: TrainingGraph) -> tuple[TrainingGraph | None, TrainingGraph]:
    """The start of the gathers that a step needs once, and the forward that awaits them.

    Before: the lowered forward of a step's first micro-batch. After: the first graph reads
    parameters alone, and returns what the second reads of it, collectives in flight among it. It is
    None where nothing is gathered once. Tier: exact.
    """
    results = dict(zip(forward.outputs, forward.results, strict=True))
    kept = [n for role, n in results.items() if isinstance(role, UnshardedParam) and n is not None]
    roles = dict(zip(forward.placeholders, forward.inputs, strict=True))
    found = [n for n in ancestors(kept) if is_lowered_start(n) and _reads_parameters(n, roles)]
    if not found:
        return None, forward
    first = {*found, *ancestors(found)}
    return _cut(forward, first, {})


def split_reductions(backward: TrainingGraph) -> tuple[TrainingGraph, TrainingGraph | None]:
    """The backward without its last waits, and these waits with what reads them.

    Before: the lowered backward of a micro-batch. After: the first graph starts all reductions, and
    computes all that the stage sends. Waits between operators stay where they are: memory rests on
    them. The second graph is None where nothing is awaited at the end. Tier: exact.
    """
    late = _late_nodes(backward)
    if not late:
        return backward, None
    body = [n for n in backward.graph.nodes if n.op in ("call_function", "get_attr")]
    results = dict(zip(backward.outputs, backward.results, strict=True))
    early: Results = {role: node for role, node in results.items() if node not in late}
    return _cut(backward, {n for n in body if n not in late}, early)


def _reads_parameters(start: fx.Node, roles: dict[fx.Node, InputRole]) -> bool:
    """Whether a collective needs parameters alone, and no other collective before it."""
    before = ancestors([start])
    inputs = [roles[n] for n in before if n.op == "placeholder"]
    waits = any(n.target is WAIT_LOWERED for n in before)
    return not waits and all(isinstance(role, Parameter) for role in inputs)


def _late_nodes(graph: TrainingGraph) -> set[fx.Node]:
    """The waits behind all other work of a graph, and the operators that read them."""
    roles: dict[fx.Node, list[OutputRole]] = {}
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if node is not None:
            roles.setdefault(node, []).append(role)
    body = [n for n in graph.graph.nodes if n.op in ("call_function", "get_attr")]
    last = set[fx.Node]()  # nothing but results of this stage needs these
    for node in reversed(body):
        users = (user for user in node.users if user.op != "output")
        is_sent = any(isinstance(role, (StageOutput, Saved)) for role in roles.get(node, ()))
        if not is_sent and not is_lowered_start(node) and all(user in last for user in users):
            last.add(node)
    places = {node: place for place, node in enumerate(body)}
    end = max((place for node, place in places.items() if node not in last), default=-1)
    found = set[fx.Node]()
    for node in body[end + 1 :]:
        if node.target is WAIT_LOWERED or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _cut(
    graph: TrainingGraph, first: set[fx.Node], early: Results
) -> tuple[TrainingGraph, TrainingGraph]:
    """The operators of `first` with the results `early`, and all others.

    The second graph has `Saved` inputs for the values that it reads of the first.
    """
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    results = dict(zip(graph.outputs, graph.results, strict=True))
    late: Results = {role: node for role, node in results.items() if role not in early}
    body = [n for n in graph.graph.nodes if n.op in ("call_function", "get_attr")]
    own = [n for n in body if n in first]
    others = [n for n in body if n not in first]
    read = [n for node in others for n in node.all_input_nodes]
    read += [n for n in late.values() if n is not None]
    names = {n: Saved(n.name) for n in read if n in first and n.op != "placeholder"}

    def inputs(nodes: list[fx.Node], ends: Results) -> dict[fx.Node, InputRole]:
        reads = {*ends.values(), *(n for node in nodes for n in node.all_input_nodes)}
        return {n: role for n, role in roles.items() if n in reads}

    return (
        extract(graph, inputs(own, early), own, early | {role: n for n, role in names.items()}),
        extract(graph, {**inputs(others, late), **names}, others, late),
    )
