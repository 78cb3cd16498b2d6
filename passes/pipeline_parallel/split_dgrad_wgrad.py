"""`split_dgrad_wgrad`: a backward split into input gradients and weight gradients.

Other stages wait for input gradients alone, so these come first; weight gradients fill idle time.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241 (B and W).
"""

from __future__ import annotations

from torch import fx

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import InputRole, OutputRole, Saved, StageOutput
from autopar.passes.core.node_builder import ancestors, extract

Results = dict[OutputRole, fx.Node | None]
Roles = dict[fx.Node, InputRole]


def split_dgrad_wgrad(backward: TrainingGraph) -> tuple[TrainingGraph, TrainingGraph]:
    """The graph of the gradients that a stage sends, and the graph of all other gradients.

    The first graph also returns `Saved` values for the second. It is empty if the stage sends
    nothing.
    """
    results = dict(zip(backward.outputs, backward.results, strict=True))
    sent: Results = {role: n for role, n in results.items() if isinstance(role, StageOutput)}
    rest: Results = {role: n for role, n in results.items() if role not in sent}
    ends = [node for node in sent.values() if node is not None]
    in_first = {*ends, *ancestors(ends)}
    nodes = [n for n in backward.graph.nodes if n.op in ("call_function", "get_attr")]
    first = [n for n in nodes if n in in_first]
    second = [n for n in nodes if n not in in_first]
    read = [n for node in second for n in node.all_input_nodes]
    read += [n for n in rest.values() if n is not None]
    saved = [n for n in dict.fromkeys(read) if n in in_first and n.op != "placeholder"]
    roles: Roles = dict(zip(backward.placeholders, backward.inputs, strict=True))
    return (
        _subgraph(backward, roles, first, sent | {Saved(n.name): n for n in saved}),
        _subgraph(backward, roles | {n: Saved(n.name) for n in saved}, second, rest),
    )


def _subgraph(
    graph: TrainingGraph, roles: Roles, body: list[fx.Node], outputs: Results
) -> TrainingGraph:
    read = {*outputs.values(), *(n for node in body for n in node.all_input_nodes)}
    return extract(graph, {n: role for n, role in roles.items() if n in read}, body, outputs)
