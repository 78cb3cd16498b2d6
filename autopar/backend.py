"""`torch.compile(model, backend="autopar")`: data parallelism inside the graphs of Dynamo.

Every rank brings its own rows, as under DDP. Parameters are replicated, and gradients are averaged
over the ranks in buckets. After graph breaks each graph averages its own gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed as dist
from torch import fx, nn

from autopar._torch_dynamo import aot_backend, default_partition, make_boxed_func
from autopar.core.common.groups import backend_of
from autopar.core.ir.graph import GraphProperty, ParameterInfo, TrainingGraph
from autopar.core.ir.mesh_levels import DATA_AXIS
from autopar.core.ir.placement import Partial, Replicate, Varying
from autopar.core.ir.roles import Gradient, Input, InputRole, Output, Parameter, Tangent
from autopar.passes.communication.bucket_collectives import BucketCollectives, propose_buckets
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.communication.schedule_overlap import ScheduleOverlap
from autopar.passes.core.node_builder import aten, call
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.runtime.agreement.consensus import is_multi_rank

BUCKET_BYTES = 16 * 2**20


def autopar(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The entry point that torch.compile finds by name."""
    trained = tuple(isinstance(value, nn.Parameter) for value in example_inputs)

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        if is_multi_rank() and any(trained):
            joint = synchronized(joint, trained, options["num_fwd_outputs"])
        return default_partition(joint, inputs, **options)

    run = aot_backend(
        fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward), partition_fn=partition
    )
    return run(module, example_inputs)


def synchronized(
    joint: fx.GraphModule, trained: Sequence[bool], forward_outputs: int
) -> fx.GraphModule:
    """A joint graph with gradients of parameters averaged over the ranks."""
    graph = as_training_graph(joint, trained, forward_outputs)
    first = run_passes(graph, [SynchronizeGradients(DATA_AXIS, rank=0)])
    buckets = propose_buckets(first, BUCKET_BYTES, BUCKET_BYTES)
    parameter = graph.placeholders[trained.index(True)]
    backend = backend_of(parameter.meta["val"].device)
    later: list[Pass] = [
        BucketCollectives(buckets),
        ScheduleOverlap(),
        LowerCollectives(backend, dist.get_rank()),
    ]
    lowered = averaged(run_passes(first, later))
    group = dist.group.WORLD
    assert group is not None
    for node in lowered.graph.nodes:
        if node.op == "call_function" and DATA_AXIS in node.args:
            node.args = tuple(group.group_name if a == DATA_AXIS else a for a in node.args)
    count = len(joint.graph.output_node().args[0])  # type: ignore[arg-type]
    results = dict(zip(lowered.outputs, lowered.results, strict=True))
    in_order = [results.get(_role(i, forward_outputs, trained)) for i in range(count)]
    lowered.output_node.args = (in_order,)
    return fx.GraphModule(joint, lowered.graph)


def as_training_graph(
    joint: fx.GraphModule, trained: Sequence[bool], forward_outputs: int
) -> TrainingGraph:
    """The joint graph with roles; the name of a parameter is its index."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(joint.graph, {}))
    inputs: list[InputRole] = []
    parameters: dict[str, ParameterInfo] = {}
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        if index >= len(trained):
            inputs.append(Tangent(index))
        elif trained[index]:
            name, value = str(index), node.meta["val"]
            inputs.append(Parameter(name))
            parameters[name] = ParameterInfo(name, tuple(value.shape), value.dtype, True, "")
        else:
            inputs.append(Input(index))
    outputs: dict[Any, fx.Node] = {}
    for index, node in enumerate(output.args[0]):
        if isinstance(node, fx.Node):
            outputs[_role(index, forward_outputs, trained)] = node
    for node in graph.nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward"
        phase = "backward" if backward else "forward"
        node.meta |= {"phase": phase, "placement": Varying(), "block": "", "source": None}
    output.args = (list(outputs.values()),)
    made = TrainingGraph(
        graph,
        tuple(inputs),
        tuple(outputs),
        parameters,
        axes={DATA_AXIS: dist.get_world_size()},
        properties=frozenset({GraphProperty.BATCH_SHARDED}),
    )
    for role, node in outputs.items():
        if isinstance(role, Gradient):
            node.meta["placement"] = Partial()
    return made


def _role(index: int, forward_outputs: int, trained: Sequence[bool]) -> Output | Gradient:
    if index < forward_outputs:
        return Output(index)
    primal = index - forward_outputs
    if primal < len(trained) and trained[primal]:
        return Gradient(Parameter(str(primal)))
    return Gradient(Input(primal))


def averaged(graph: TrainingGraph) -> TrainingGraph:
    """Divides reduced gradients by the number of ranks."""
    graph = graph.copy()
    changed: dict[Any, fx.Node] = {}
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if isinstance(role, Gradient) and isinstance(role.of, Parameter) and node is not None:
            graph.graph.inserting_before(graph.output_node)
            mean = call(graph.graph, node, aten.div.Scalar, node, graph.axes[DATA_AXIS])
            mean.meta |= {"placement": Replicate(), "phase": "backward"}
            changed[role] = mean
    for node in graph.calls():
        if node.meta["phase"] == "backward":
            node.meta["partitioner_tag"] = "is_backward"
    return graph.with_results(changed)
