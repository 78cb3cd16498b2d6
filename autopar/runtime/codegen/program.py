"""`Program`: the generated code of one rank for a captured call."""

from __future__ import annotations

import linecache
import logging
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autopar._torch import BoxedCodeGen
from autopar.capture.trace import Capture
from autopar.ir.graph import TrainingGraph, render_node, tensors
from autopar.ir.roles import InputRole, Output, OutputRole, Tangent
from autopar.passes.core.node_builder import is_random
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.passes.registration import disabled_passes
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.plan.partition import NodeStrategies
from autopar.report.plan import Plan
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.codegen.compile import BoxedFunction, compile_graph, donated_args
from autopar.runtime.codegen.recorder import Recorder

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
logger = logging.getLogger(__name__)

OUT_OF_PLACE = {
    c10d.all_reduce_.default: c10d.all_reduce.default,
    aten.add_.Tensor: aten.add.Tensor,
}
"""In-place operators of lowered graphs that compilers take out of place.

Compilers accept no in-place collective. For an in-place sum into a slice of a bucket they would
copy the whole bucket.
"""


@dataclass(frozen=True)
class CompiledGraph:
    """A graph with its generated function.

    Attributes:
        graph: the graph.
        run: the function; it empties its list of arguments.
        donated_args: positions of arguments that the function may overwrite.
    """

    graph: TrainingGraph
    run: BoxedFunction
    donated_args: tuple[int, ...] = ()

    @property
    def inputs(self) -> tuple[InputRole, ...]:
        """The role of every argument."""
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[OutputRole, ...]:
        """The role of every result."""
        return self.graph.outputs

    @cached_property
    def fake_tensors(self) -> dict[InputRole | OutputRole, torch.Tensor]:
        """The fake tensor of each argument and result."""
        graph = self.graph
        nodes = dict(zip(graph.inputs, graph.placeholders, strict=True))
        nodes |= {r: n for r, n in zip(graph.outputs, graph.results, strict=True) if n is not None}  # type: ignore[misc]
        return {role: tensors(node)[0] for role, node in nodes.items()}

    def fake_tensor(self, role: InputRole) -> torch.Tensor:
        """The fake tensor of an argument."""
        return self.fake_tensors[role]


@dataclass(frozen=True)
class Program:
    """The generated code of one rank for a call.

    Attributes:
        capture: the captured call.
        graph: joint graph after all passes.
        forward: the forward.
        backward: the backward, None without gradients.
    """

    capture: Capture
    graph: TrainingGraph
    forward: CompiledGraph
    backward: CompiledGraph | None

    @cached_property
    def is_random(self) -> bool:
        """Whether the program draws random numbers."""
        return any(is_random(node) for node in self.graph.calls())

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """Indices of returned tensors among the flattened outputs."""
        return tuple(r.index for r in self.forward.outputs if isinstance(r, Output))

    @cached_property
    def tangents(self) -> frozenset[int]:
        """Indices of the outputs that may receive gradients."""
        roles = self.backward.inputs if self.backward else ()
        return frozenset(r.index for r in roles if isinstance(r, Tangent))


@dataclass(frozen=True)
class LoweringOptions:
    """Options of lowering a call on one rank.

    Attributes:
        plan: the plan.
        rank: rank in the world.
        comm_backend: torch.distributed backend that collectives are lowered for.
        groups: process group of each mesh axis.
        compile_backend: "eager" for generated Python, or a backend of torch.compile.
        no_sync: whether gradients stay unreduced.
        unreduced: names of parameters with unreduced gradients of earlier calls.
    """

    plan: Plan
    rank: int
    comm_backend: str
    groups: Mapping[str, str]
    compile_backend: str = "eager"
    no_sync: bool = False
    unreduced: tuple[str, ...] = ()

    @property
    def is_compiled(self) -> bool:
        """Whether a backend of torch.compile follows."""
        return self.compile_backend != "eager"


def build_program(
    capture: Capture,
    op_strategies: Sequence[NodeStrategies],
    options: LoweringOptions,
    recorder: Recorder | None = None,
) -> Program:
    """Lowers a capture and generates its code.

    Args:
        capture: the captured call.
        op_strategies: strategies of the nodes for each partitioned axis.
        options: options of lowering.
        recorder: records when each operator runs.
    """
    passes = build_pass_pipeline(
        options.plan,
        options.rank,
        options.comm_backend,
        op_strategies=op_strategies,
        hold=options.no_sync,
        held=options.unreduced,
        compiled=options.is_compiled,
        disable=disabled_passes(),
    )
    logger.debug("passes of rank %d under plan %s:\n%s", options.rank, options.plan.name, passes)
    graph = run_passes(with_axes(capture.graph, options.plan), passes)
    split = split_forward_backward(graph)
    groups, backend = options.groups, options.compile_backend
    forward = CompiledGraph(split.forward, generate(split.forward, groups, backend, (), recorder))
    if recorder is not None:
        forward = replace(forward, run=recorder.starting_step(graph, forward.run))
    backward = None
    if split.backward is not None:
        donated = donated_args(split.forward, split.backward) if options.is_compiled else ()
        run = generate(split.backward, groups, backend, donated, recorder)
        backward = CompiledGraph(split.backward, run, donated)
    return Program(capture, graph, forward, backward)


def with_axes(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """A captured graph with the mesh axes of a plan and their levels."""
    return replace(graph, axes=plan.axes)


def generate(
    graph: TrainingGraph,
    groups: Mapping[str, str],
    compile_backend: str,
    donated: tuple[int, ...] = (),
    recorder: Recorder | None = None,
) -> BoxedFunction:
    """A function for a lowered graph; it takes a list and frees each argument after its last use.

    Args:
        graph: forward or backward of a lowered graph.
        groups: process group of each mesh axis.
        compile_backend: "eager" for generated Python, or a backend of torch.compile.
        donated: positions of arguments that compiled code may overwrite.
        recorder: records when each operator runs.
    """
    module = fx.GraphModule(dict(graph.constants), graph.copy().graph)
    for node in module.graph.nodes:
        if "_c10d_functional" in str(node.target) and node.args[-1] in groups:
            node.args = (*node.args[:-1], groups[node.args[-1]])
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # kernels may return other strides than fake tensors
    if compile_backend != "eager":
        for in_place, out_of_place in OUT_OF_PLACE.items():
            for node in module.graph.find_nodes(op="call_function", target=in_place):
                node.target = out_of_place
        module.recompile()
        return compile_graph(module, compile_backend, donated)
    record = recorder.instrument(module.graph) if recorder else None
    _finish_exchange_first(module.graph)
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    run = _locating_errors(module)
    return record(run) if record else run


def _finish_exchange_first(graph: fx.Graph) -> None:
    """Delays the end of the ranks' exchange to the first collective, to overlap it with compute."""
    first = next((n for n in graph.nodes if "_c10d_functional" in str(n.target)), None)
    if first is not None:
        with graph.inserting_before(first):
            graph.call_function(finish_exchange)


def _locating_errors(module: fx.GraphModule) -> BoxedFunction:
    """The generated function; its errors name the operator and the user's line."""
    nodes = {node.name: node for node in module.graph.nodes}
    run = module.forward

    def run_located(arguments: list[Any]) -> list[Any]:
        try:
            return run(arguments)
        except Exception as error:
            for frame, number in traceback.walk_tb(error.__traceback__):
                file = frame.f_code.co_filename
                if file.startswith("<eval_with_key>"):
                    name = linecache.getline(file, number).strip().split(" ")[0].rstrip(":")
                    if name in nodes:
                        error.add_note(f"in the graph of this rank at {render_node(nodes[name])}")
            raise

    return run_located
