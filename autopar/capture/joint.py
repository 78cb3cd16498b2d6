"""`to_training_graph`: AOTAutograd's joint graph as a TrainingGraph."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar._torch import OpOverload, descriptors
from autopar.capture.provenance import annotate_nodes
from autopar.capture.traced_call import TracedCall
from autopar.core.ir import roles
from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.errors import CaptureError

aten = torch.ops.aten


def to_training_graph(module: fx.GraphModule, call: TracedCall) -> TrainingGraph:
    """AOTAutograd's joint graph with descriptors as a TrainingGraph with roles."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    old_output = next(iter(reversed(module.graph.nodes)))
    inputs = [n.meta["desc"] for n in graph.find_nodes(op="placeholder")]
    outputs = list(old_output.meta["desc"])
    output.args = (list(output.args[0]),)
    annotate_nodes(graph, call.infos)
    _move_forward_up(graph)
    _mark_failures(graph)
    _join_without_nothing(graph)
    for node in [n for n in graph.nodes if n.target in (aten.detach.default, aten.alias.default)]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    training = TrainingGraph(
        graph,
        tuple(_input_role(d, call) for d in inputs),
        (),
        dict(call.infos),
        constants={n.target: getattr(module, n.target) for n in graph.find_nodes(op="get_attr")},
        history=(f"captured from {type(call.model[0]).__name__}",),
    )
    results = {
        _output_role(d, call): value  # a rebound buffer keeps its last value
        for d, value in zip(outputs, output.args[0], strict=True)
        if d is not None and isinstance(value, fx.Node)
    }
    output.args = (list(results.values()),)
    graph.eliminate_dead_code()
    for role, value in results.items():
        if value.meta["val"] is not None and value.meta["val"].layout is not torch.strided:
            raise CaptureError(f"{role} is a sparse tensor; use dense ones (sparse=False)")
    training = replace(training, outputs=tuple(results))
    _keep_old_values(training)
    return training


def _move_forward_up(graph: fx.Graph) -> None:
    """Moves operators of the forward before the backward.

    AOTAutograd ends with the views of buffers that forward has changed and returns.
    """
    first: fx.Node | None = None
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        if node.meta["phase"] == "backward":
            first = first or node
        elif first is not None:
            first.prepend(node)


def changed_parameters(
    module: fx.GraphModule, parameters: Mapping[str, ParameterInfo]
) -> list[str]:
    """Frozen parameters that a joint graph with descriptors changes in place."""
    output, names = next(iter(reversed(module.graph.nodes))), tuple(parameters)
    mutations = (
        d for d in output.meta["desc"] if isinstance(d, descriptors.InputMutationAOTOutput)
    )
    inputs = (d.mutated_input for d in mutations)
    changed = [_name_of(d, names) for d in inputs if isinstance(d, descriptors.ParamAOTInput)]
    return [name for name in changed if not parameters[name].requires_grad]


def _name_of(desc: Any, parameters: Sequence[str]) -> str:
    return parameters[int(desc.target.removeprefix("values."))]


def _keep_old_values(graph: TrainingGraph) -> None:
    """Copies inputs that the forward updates in place, for use in the backward."""
    updated = {role.of for role in graph.outputs if isinstance(role, roles.Update)}
    first = next(iter(graph.calls()), None)
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        late = [u for u in node.users if u.op != "output" and u.meta["phase"] == "backward"]
        if role not in updated or not late or first is None:
            continue
        with graph.graph.inserting_before(first):
            copy = graph.graph.call_function(aten.clone.default, (node,))
        copy.meta = {**node.meta, "phase": "forward", "seq_nr": None}
        for user in late:
            user.replace_input_with(node, copy)


def _input_role(desc: Any, call: TracedCall) -> roles.InputRole:
    if isinstance(desc, descriptors.ParamAOTInput):
        return roles.Parameter(_name_of(desc, call.names))
    if isinstance(desc, descriptors.BufferAOTInput):
        return roles.Buffer(call.buffer_names[int(desc.target.removeprefix("b"))])
    if isinstance(desc, descriptors.PlainAOTInput):
        return roles.Input(call.positions[desc.idx])
    if isinstance(desc, descriptors.TangentAOTInput):
        return roles.Tangent(_output_index(desc.output, call))
    raise CaptureError(
        f"the captured graph has an input that autopar does not know: {desc}. The model probably "
        "returns a view of an argument that it also changes in place; return a copy instead."
    )


def _output_role(desc: Any, call: TracedCall) -> roles.OutputRole:
    if isinstance(desc, descriptors.PlainAOTOutput):
        index = desc.idx - sum(call.tensor_leaves)
        if index >= 0:
            return roles.Update(roles.Buffer(call.rebound[index]))
        return roles.Output(_output_index(desc, call))
    if isinstance(desc, descriptors.GradAOTOutput):
        of = _input_role(desc.grad_of, call)
        assert isinstance(of, (roles.Parameter, roles.Input))
        return roles.Gradient(of)
    if isinstance(desc, descriptors.InputMutationAOTOutput):
        of = _input_role(desc.mutated_input, call)
        if isinstance(of, (roles.Buffer, roles.Input)):
            return roles.Update(of)
        if isinstance(of, roles.Parameter):
            raise _changed_in_place(of.name)
    raise CaptureError(f"the captured graph has an output that autopar does not know: {desc}")


def _changed_in_place(parameter: str) -> CaptureError:
    return CaptureError(
        f"forward changes parameter {parameter} in place, which only an optimizer may do. Change "
        "it outside of forward, under torch.no_grad(), freeze it (requires_grad_(False)), or make "
        "it a buffer (self.register_buffer): forward may change frozen parameters and buffers."
    )


def _output_index(desc: Any, call: TracedCall) -> int:
    mutated = getattr(desc, "mutated_input", None)
    if isinstance(mutated, descriptors.ParamAOTInput):
        raise _changed_in_place(_name_of(mutated, call.names))
    if not isinstance(desc, descriptors.PlainAOTOutput):
        raise CaptureError(
            f"the model changes in place what gradients flow into ({type(desc).__name__}): an "
            "input that requires them. Change a copy, or do so outside of forward."
        )
    tensors = [i for i, is_tensor in enumerate(call.tensor_leaves) if is_tensor]
    return tensors[desc.idx]


def _join_without_nothing(graph: fx.Graph) -> None:
    """Leaves tensors of shape (0,) out of concatenations with tensors of more dims.

    Torch skips them: caches of keys and values begin so. Kept, they would have no batch dim, and
    the concatenation would need all rows.
    """
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        parts, whole = node.args[0], node.meta["val"]
        kept = [part for part in parts if part.meta["val"].shape != (0,)]
        has_dims = len(kept) < len(parts) and whole.dim() > 1
        if has_dims and kept and all(part.meta["val"].dtype == whole.dtype for part in kept):
            node.args = (kept, *node.args[1:])


# -- failed factorisations ---------------------------------------------------------------------


def _mark_failures(graph: fx.Graph) -> None:
    """Makes results of failed matrix factorisations NaN, since a graph cannot raise.

    Eager `torch.linalg` functions raise for a singular or not positive definite matrix, by reading
    the status `info` of the kernel. Operators whose `info` the model reads, such as `cholesky_ex`,
    keep the kernel's results.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        names = [result.name for result in node.target._schema.returns]
        if "info" not in names:
            continue
        place = names.index("info")
        elements = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if place in elements and elements[place].users:
            continue
        for index, result in elements.items():
            value = result.meta["val"]
            if index != place and (value.is_floating_point() or value.is_complex()):
                _mark(graph, node, place, result)


def _mark(graph: fx.Graph, source: fx.Node, place: int, result: fx.Node) -> None:
    """Replaces a result by NaN for each matrix with a status other than 0."""
    users, value, known = list(result.users), result.meta["val"], source.meta["val"][place]

    def op(target: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        fakes = [a.meta["val"] if isinstance(a, fx.Node) else a for a in args]
        node.meta = {**result.meta, "val": target(*fakes)}
        return node

    # a copy is dense in the order of its dims, but views of the result follow its own order
    order = sorted(range(value.dim()), key=lambda dim: -value.stride()[dim])
    places = sorted(order, key=order.__getitem__)
    with graph.inserting_before(result.next), value.fake_mode:
        failed = op(aten.ne.Scalar, op(operator.getitem, source, place), 0)
        shape = [*known.shape, *[1] * (value.dim() - known.dim())]
        failed = op(aten.permute.default, op(aten.view.default, failed, shape), order)
        dense = op(aten.permute.default, result, order)
        marked = op(aten.masked_fill.Scalar, dense, failed, math.nan)
        replacement = op(aten.permute.default, marked, places)
    for user in users:
        user.replace_input_with(result, replacement)
