"""`to_training_graph`: AOTAutograd's joint graph as a TrainingGraph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar import _torch
from autopar.capture.checked_linalg import mark_failures
from autopar.capture.provenance import annotate_nodes
from autopar.errors import CaptureError
from autopar.ir.graph import ParameterInfo, TrainingGraph
from autopar.ir.roles import (
    Buffer,
    Gradient,
    Input,
    InputRole,
    Output,
    OutputRole,
    Parameter,
    Tangent,
    Update,
)

TRANSPARENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


@dataclass(frozen=True)
class CallSignature:
    """Inputs and outputs of a traced call.

    Attributes:
        parameters: names of the parameters, in order.
        buffers: names of the buffers, in order.
        positions: indices of the tensors among the flattened arguments.
        tensor_leaves: which outputs are tensors.
        rebound: buffers whose new values follow the outputs.
    """

    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    positions: tuple[int, ...]
    tensor_leaves: tuple[bool, ...]
    rebound: tuple[str, ...]


def to_training_graph(
    module: fx.GraphModule, call: CallSignature, parameters: Mapping[str, ParameterInfo], name: str
) -> TrainingGraph:
    """AOTAutograd's joint graph with descriptors as a TrainingGraph with roles."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    old_output = next(iter(reversed(module.graph.nodes)))
    inputs = [n.meta["desc"] for n in graph.find_nodes(op="placeholder")]
    outputs = list(old_output.meta["desc"])
    output.args = (list(output.args[0]),)
    annotate_nodes(graph, parameters)
    mark_failures(graph)
    for node in [n for n in graph.nodes if n.target in TRANSPARENT]:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    training = TrainingGraph(
        graph,
        tuple(_input_role(d, call) for d in inputs),
        (),
        dict(parameters),
        constants={n.target: getattr(module, n.target) for n in graph.find_nodes(op="get_attr")},
        history=(f"captured from {name}",),
    )
    roles = {
        _output_role(d, call): value  # a rebound buffer keeps its last value
        for d, value in zip(outputs, output.args[0], strict=True)
        if d is not None and isinstance(value, fx.Node)
    }
    output.args = (list(roles.values()),)
    graph.eliminate_dead_code()
    for role, value in roles.items():
        if value.meta["val"] is not None and value.meta["val"].layout is not torch.strided:
            raise CaptureError(f"{role} is a sparse tensor; use dense ones (sparse=False)")
    training = replace(training, outputs=tuple(roles))
    _keep_old_values(training)
    return training


def changed_parameters(
    module: fx.GraphModule, parameters: Mapping[str, ParameterInfo]
) -> list[str]:
    """Frozen parameters that a joint graph with descriptors changes in place."""
    output, names = next(iter(reversed(module.graph.nodes))), tuple(parameters)
    mutations = (d for d in output.meta["desc"] if isinstance(d, _torch.InputMutationAOTOutput))
    inputs = (d.mutated_input for d in mutations)
    changed = [_name_of(d, names) for d in inputs if isinstance(d, _torch.ParamAOTInput)]
    return [name for name in changed if not parameters[name].requires_grad]


def _name_of(desc: Any, parameters: Sequence[str]) -> str:
    return parameters[int(desc.target.removeprefix("values."))]


def _keep_old_values(graph: TrainingGraph) -> None:
    """Copies inputs that the forward updates in place, for use in the backward."""
    updated = {role.of for role in graph.outputs if isinstance(role, Update)}
    first = next(iter(graph.calls()), None)
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        late = [u for u in node.users if u.op != "output" and u.meta["phase"] == "backward"]
        if role not in updated or not late or first is None:
            continue
        with graph.graph.inserting_before(first):
            copy = graph.graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {**node.meta, "phase": "forward", "seq_nr": None}
        for user in late:
            user.replace_input_with(node, copy)


def _input_role(desc: Any, call: CallSignature) -> InputRole:
    if isinstance(desc, _torch.ParamAOTInput):
        return Parameter(_name_of(desc, call.parameters))
    if isinstance(desc, _torch.BufferAOTInput):
        return Buffer(call.buffers[int(desc.target.removeprefix("b"))])
    if isinstance(desc, _torch.PlainAOTInput):
        return Input(call.positions[desc.idx])
    if isinstance(desc, _torch.TangentAOTInput):
        return Tangent(_output_index(desc.output, call))
    raise CaptureError(
        f"the captured graph has an input that autopar does not know: {desc}. The model probably "
        "returns a view of an argument that it also changes in place; return a copy instead."
    )


def _output_role(desc: Any, call: CallSignature) -> OutputRole:
    if isinstance(desc, _torch.PlainAOTOutput):
        index = desc.idx - sum(call.tensor_leaves)
        if index >= 0:
            return Update(Buffer(call.rebound[index]))
        return Output(_output_index(desc, call))
    if isinstance(desc, _torch.GradAOTOutput):
        of = _input_role(desc.grad_of, call)
        assert isinstance(of, (Parameter, Input))
        return Gradient(of)
    if isinstance(desc, _torch.InputMutationAOTOutput):
        of = _input_role(desc.mutated_input, call)
        if isinstance(of, (Buffer, Input)):
            return Update(of)
        if isinstance(of, Parameter):
            raise _changed_in_place(of.name)
    raise CaptureError(f"the captured graph has an output that autopar does not know: {desc}")


def _changed_in_place(parameter: str) -> CaptureError:
    return CaptureError(
        f"forward changes parameter {parameter} in place, which only an optimizer may do. Change "
        "it outside of forward, under torch.no_grad(), freeze it (requires_grad_(False)), or make "
        "it a buffer (self.register_buffer): forward may change frozen parameters and buffers."
    )


def _output_index(desc: Any, call: CallSignature) -> int:
    mutated = getattr(desc, "mutated_input", None)
    if isinstance(mutated, _torch.ParamAOTInput):
        raise _changed_in_place(_name_of(mutated, call.parameters))
    if not isinstance(desc, _torch.PlainAOTOutput):
        raise CaptureError(
            f"the model changes in place what gradients flow into ({type(desc).__name__}): an "
            "input that requires them. Change a copy, or do so outside of forward."
        )
    tensors = [i for i, is_tensor in enumerate(call.tensor_leaves) if is_tensor]
    return tensors[desc.idx]
