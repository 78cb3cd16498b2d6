"""A captured call, lowered under a plan: the generated code of one rank."""

from __future__ import annotations

import linecache
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
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.plan.partition import NodeStrategies
from autopar.report.plan import Plan
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.codegen.compile import BoxedFunction, compile_graph, donated_args
from autopar.runtime.codegen.recorder import Recorder

c10d = torch.ops._c10d_functional
aten = torch.ops.aten

OUT_OF_PLACE = {
    c10d.all_reduce_.default: c10d.all_reduce.default,
    aten.add_.Tensor: aten.add.Tensor,
}
"""What lowering does in place, for compilers, which choose their buffers themselves: they take no
collective in place, and of a sum into a piece of a bucket they make a copy of all the bucket."""


@dataclass(frozen=True)
class CompiledGraph:
    """One generated function and what its arguments and results are.

    Attributes:
        graph: what it computes.
        run: the function; it empties the list of its arguments.
        donated: places of arguments that it may overwrite.
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
    """What a call runs.

    Attributes:
        capture: the call, with the structure of its result.
        graph: the joint graph after all passes.
        forward: the forward half.
        backward: the backward half, None without a backward.
    """

    capture: Capture
    graph: TrainingGraph
    forward: CompiledGraph
    backward: CompiledGraph | None

    @cached_property
    def is_random(self) -> bool:
        """Whether the forward draws random numbers."""
        return any(is_random(node) for node in self.graph.calls())

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """The indices of returned tensors among the flattened outputs."""
        return tuple(r.index for r in self.forward.outputs if isinstance(r, Output))

    @cached_property
    def tangents(self) -> frozenset[int]:
        """The outputs that gradients may enter by."""
        roles = self.backward.inputs if self.backward else ()
        return frozenset(r.index for r in roles if isinstance(r, Tangent))


def build_program(
    capture: Capture,
    plan: Plan,
    *,
    rank: int,
    op_strategies: Sequence[NodeStrategies] = (),
    comm_backend: str,
    groups: Mapping[str, str],
    compile_backend: str = "eager",
    hold: bool = False,
    held: tuple[str, ...] = (),
    recorder: Recorder | None = None,
) -> Program:
    """Lowers a capture under a plan and generates its code.

    Args:
        capture: the call.
        plan: what to do.
        rank: this rank in the world.
        op_strategies: of the graph before each axis that the model is partitioned along.
        comm_backend: what collectives are lowered for.
        groups: process group of each mesh axis.
        compile_backend: "eager" for generated Python, or a backend of torch.compile.
        hold: keep gradients local (`no_sync`).
        held: parameters with gradients held from earlier calls.
        recorder: is told when each operator runs.
    """
    through = compile_backend != "eager"
    passes = build_pass_pipeline(
        plan,
        rank,
        comm_backend,
        op_strategies=op_strategies,
        hold=hold,
        held=held,
        compiled=through,
    )
    graph = run_passes(with_axes(capture.graph, plan), passes)
    split = split_forward_backward(graph)

    def half(part: TrainingGraph, donated: tuple[int, ...] = ()) -> CompiledGraph:
        return CompiledGraph(
            part, generate(part, groups, compile_backend, donated, recorder), donated
        )

    forward, backward = half(split.forward), None
    if recorder is not None:
        forward = replace(forward, run=recorder.starting_step(graph, forward.run))
    if split.backward is not None:
        spare = donated_args(split.forward, split.backward) if through else ()
        backward = half(split.backward, spare)
    return Program(capture, graph, forward, backward)


def with_axes(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """The captured graph with the axes of the plan's mesh, and their levels."""
    return replace(graph, axes=plan.axes)


def generate(
    graph: TrainingGraph,
    groups: Mapping[str, str],
    compile_backend: str,
    donated: tuple[int, ...] = (),
    recorder: Recorder | None = None,
) -> BoxedFunction:
    """The code of a graph: it takes its arguments in a list and frees each early.

    Args:
        graph: a half of a lowered graph.
        groups: process group of each mesh axis.
        compile_backend: "eager" for generated Python, or a backend of torch.compile.
        donated: places of arguments that compiled code may overwrite.
        recorder: is told when each operator runs.
    """
    module = fx.GraphModule(dict(graph.constants), graph.copy().graph)
    for node in module.graph.nodes:
        if "_c10d_functional" in str(node.target) and node.args[-1] in groups:
            node.args = (*node.args[:-1], groups[node.args[-1]])
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # kernels may give other strides than fakes foretell
    if compile_backend != "eager":
        for before, after in OUT_OF_PLACE.items():
            for node in module.graph.find_nodes(op="call_function", target=before):
                node.target = after
        module.recompile()
        return compile_graph(module, compile_backend, donated)
    wrap = recorder.instrument(module.graph) if recorder else None
    _settle_first(module.graph)
    module.graph.set_codegen(BoxedCodeGen())
    module.recompile()
    run = _located(module)
    return wrap(run) if wrap else run


def _settle_first(graph: fx.Graph) -> None:
    """Has the ranks agree on the call before the first collective, while they compute."""
    first = next((n for n in graph.nodes if "_c10d_functional" in str(n.target)), None)
    if first is not None:
        with graph.inserting_before(first):
            graph.call_function(finish_exchange)


def _located(module: fx.GraphModule) -> BoxedFunction:
    """The generated function; an error inside it names the operator and the user's line."""
    nodes = {node.name: node for node in module.graph.nodes}
    run = module.forward

    def located(arguments: list[Any]) -> list[Any]:
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

    return located
