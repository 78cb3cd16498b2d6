"""`Program`: the generated code of one rank for a captured call."""

from __future__ import annotations

import functools
import linecache
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch import fx

from autopar._torch import (
    BoxedCodeGen,
    OpOverload,
    forget_code_with,
    inductor_compile,
    profiler_is_on,
    skip_autograd,
)
from autopar.capture.trace import Capture
from autopar.core.common.notices import warn_once
from autopar.core.ir.graph import TrainingGraph, elements, render_node, tensors
from autopar.core.ir.roles import (
    Buffer,
    Gradient,
    InputRole,
    Output,
    OutputRole,
    Parameter,
    Saved,
    Tangent,
    Update,
)
from autopar.core.operators.held_reads import without_aliases
from autopar.core.plan.layout import Layout
from autopar.core.plan.partition import NodeStrategies
from autopar.core.plan.plan import Plan
from autopar.errors import AutoparWarning
from autopar.passes.core.node_builder import is_random, sequence_of, storage_owner
from autopar.passes.core.runner import run_passes
from autopar.passes.fold_views import fold_views
from autopar.passes.pipeline import build_pass_pipeline
from autopar.passes.registration import disabled_passes
from autopar.passes.split_forward_backward import split_forward_backward
from autopar.runtime.agreement.channel import finish_exchange
from autopar.runtime.codegen.absent_rows import with_absent_rows
from autopar.runtime.codegen.bindings import use_bindings
from autopar.runtime.codegen.ranges import range_names, with_ranges
from autopar.runtime.codegen.recorder import BoxedFunction, Recorder
from autopar.runtime.watch.collective_log import log_waits

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
    """A graph with its generated function."""

    graph: TrainingGraph
    run: BoxedFunction  # empties its list of arguments
    donated_args: tuple[int, ...] = ()  # positions that `run` may overwrite

    @cached_property
    def parameter_inputs(self) -> tuple[tuple[int, str], ...]:
        """Position and name of each parameter among the inputs."""
        pairs = enumerate(self.graph.inputs)
        return tuple((i, role.name) for i, role in pairs if isinstance(role, Parameter))

    @cached_property
    def other_inputs(self) -> tuple[tuple[int, InputRole], ...]:
        """Position and role of each other input."""
        pairs = enumerate(self.graph.inputs)
        return tuple((i, role) for i, role in pairs if not isinstance(role, Parameter))

    @cached_property
    def unsaved_inputs(self) -> tuple[tuple[int, InputRole], ...]:
        """Position and role of each input that is not saved; saved ones come in their order."""
        pairs = enumerate(self.graph.inputs)
        return tuple((i, role) for i, role in pairs if not isinstance(role, Saved))

    @cached_property
    def saved_outputs(self) -> tuple[int, ...]:
        """Positions of saved tensors among the outputs."""
        return tuple(i for i, role in enumerate(self.graph.outputs) if isinstance(role, Saved))

    @cached_property
    def other_outputs(self) -> tuple[tuple[int, OutputRole], ...]:
        """Position and role of each output that is not saved, nor a gradient."""
        pairs = enumerate(self.graph.outputs)
        return tuple((i, r) for i, r in pairs if not isinstance(r, (Saved, Gradient)))

    @cached_property
    def gradient_outputs(self) -> dict[str | int, int]:
        """Position of each gradient, by the name of a parameter or the index of an input."""
        return {
            role.key: place
            for place, role in enumerate(self.graph.outputs)
            if isinstance(role, Gradient)
        }

    @cached_property
    def fake_tensors(self) -> dict[InputRole | OutputRole, torch.Tensor]:
        graph = self.graph
        nodes = dict(zip(graph.inputs, graph.placeholders, strict=True))
        nodes |= {r: n for r, n in zip(graph.outputs, graph.results, strict=True) if n is not None}  # type: ignore[misc]
        return {role: tensors(node)[0] for role, node in nodes.items()}


@dataclass(frozen=True)
class Program:
    """The generated code of one rank for a call."""

    capture: Capture  # with the graph after all passes
    graph: TrainingGraph  # after all passes
    forward: CompiledGraph
    backward: CompiledGraph | None
    outputs_by_gradient: Mapping[str | int, frozenset[int]]

    @cached_property
    def is_random(self) -> bool:
        return any(is_random(node) for node in self.graph.calls())

    @cached_property
    def draws(self) -> tuple[tuple[str, tuple[torch.Size | None, ...]], ...]:
        """The random operators of the forward in their order, with the shapes of their results."""
        drawn = filter(is_random, self.forward.graph.calls())
        return tuple(
            (str(n.target), tuple(None if t is None else t.shape for t in elements(n)))
            for n in drawn
        )

    @cached_property
    def returned_parameters(self) -> frozenset[int]:
        """Positions of the parameters that share their storage with a result."""
        graph = self.forward.graph
        pairs = zip(graph.outputs, graph.results, strict=True)
        shared = {storage_owner(n) for r, n in pairs if n is not None and not isinstance(r, Saved)}
        inputs = enumerate(zip(graph.inputs, graph.placeholders, strict=True))
        return frozenset(i for i, (r, n) in inputs if isinstance(r, Parameter) and n in shared)

    @cached_property
    def overwritten_buffers(self) -> tuple[str, ...]:
        """Buffers that the forward changes, and whose old values its results depend on."""
        graph = self.forward.graph
        changed = {role.of for role in graph.outputs if isinstance(role, Update)}
        pairs = zip(graph.outputs, graph.results, strict=True)
        results = {node for role, node in pairs if isinstance(role, Output)}
        return tuple(
            role.name
            for role, node in zip(graph.inputs, graph.placeholders, strict=True)
            if isinstance(role, Buffer) and role in changed and _reaches(node, results)
        )

    @cached_property
    def returned(self) -> tuple[int, ...]:
        """Indices of returned tensors among the flattened outputs."""
        return tuple(r.index for r in self.forward.graph.outputs if isinstance(r, Output))

    @cached_property
    def tangents(self) -> frozenset[int]:
        """Indices of the outputs that may receive gradients; the backward need not read them."""
        return frozenset(r.index for r in self.graph.inputs if isinstance(r, Tangent))

    @cached_property
    def has_all_tangents(self) -> bool:
        """Whether each output that may be differentiated has its gradient in the backward."""
        differentiable = self.capture.differentiable
        return self.tangents.issuperset(i for i in self.returned if differentiable[i])


def _reaches(start: fx.Node, results: Collection[fx.Node | None]) -> bool:
    """Whether a result depends on a buffer; that of a batch norm in training on no statistics."""
    seen, waiting = {start}, [start]
    while waiting:
        node = waiting.pop()
        if node in results:
            return True
        for user in node.users:
            if user not in seen and user.op != "output" and not _is_statistic_of(node, user):
                seen.add(user)
                waiting.append(user)
    return False


def _is_statistic_of(node: fx.Node, norm: fx.Node) -> bool:
    """Whether a batch norm in training only updates a value: it takes the batch's statistics."""
    if not isinstance(norm.target, OpOverload):
        return False
    names = [argument.name for argument in norm.target._schema.arguments]
    arguments = dict(zip(names, norm.args, strict=False)) | dict(norm.kwargs)
    trains = arguments.get("training", arguments.get("train", False))
    places = [name for name, value in arguments.items() if value is node]
    return trains is True and set(places) <= {"running_mean", "running_var"}


def untouched(
    outputs_by_gradient: Mapping[str | int, frozenset[int]], outputs: Collection[int]
) -> set[str | int]:
    """Parameters and inputs on which none of these outputs depends.

    As on one device their gradient is None, so that an optimizer does not even decay them.
    """
    pairs = outputs_by_gradient.items()
    return {key for key, sources in pairs if sources and sources.isdisjoint(outputs)}


@dataclass(frozen=True)
class LoweringOptions:
    """Options of lowering a call on one rank.

    Attributes:
        groups: process group of each mesh axis.
        compile_backend: "eager" for generated Python, or a backend of torch.compile.
        no_sync: whether gradients stay unreduced.
        unreduced: names of parameters with unreduced gradients of earlier calls.
    """

    plan: Plan
    rank: int
    comm_backend: str
    groups: Mapping[str, str]
    compile_backend: str
    no_sync: bool
    unreduced: tuple[str, ...]

    @property
    def is_compiled(self) -> bool:
        return self.compile_backend != "eager"


def compiler_for(plan: Plan, backend: str) -> str:
    """The compiler of a plan's programs: none where sizes are known only in a step."""
    if backend == "eager" or not any(partition.routes for partition in plan.partitions):
        return backend
    warn_once(
        AutoparWarning,
        f"backend={backend!r} compiles nothing: the plan sends each token to the ranks of its "
        "experts, so sizes differ from step to step. Strategy(route_experts=False) gathers all "
        "tokens instead, and programs are compiled.",
    )
    return "eager"


def build_program(
    capture: Capture,
    op_strategies: Sequence[NodeStrategies],
    options: LoweringOptions,
    recorder: Recorder | None = None,
) -> Program:
    """Lowers a capture and generates its code."""
    derives = capture.call is not None and bool(capture.call.derivatives)
    # Results of a derivative are gradients, none of which may be left out.
    plan = replace(options.plan, loss_chunks=1) if derives else options.plan
    passes = build_pass_pipeline(
        plan,
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
    split = split_forward_backward(graph if options.is_compiled else fold_views(graph))
    forward = generate(split.forward, options, recorder=recorder)
    if recorder is not None:
        forward = replace(forward, run=recorder.starting_step(graph, forward.run))
    backward = None
    if split.backward is not None:
        donated = _donated_args(split.forward, split.backward) if options.is_compiled else ()
        backward = generate(split.backward, options, donated, recorder)
    leaves = with_absent_rows(capture.leaves, capture.graph, graph.outputs)
    # captured graphs are large
    lean = replace(capture, graph=graph, captured_graph=graph, leaves=leaves)
    return Program(lean, graph, forward, backward, capture.graph.outputs_by_gradient())


def with_axes(graph: TrainingGraph, plan: Plan) -> TrainingGraph:
    """A captured graph with the mesh axes of a plan and their levels."""
    return replace(graph, axes=Layout(plan).axes)


def generate(
    graph: TrainingGraph,
    options: LoweringOptions,
    donated: tuple[int, ...] = (),
    recorder: Recorder | None = None,
) -> CompiledGraph:
    """A lowered graph with its function, which frees each argument after its last use."""
    module = fx.GraphModule(dict(graph.constants), graph.copy().graph)
    axes: dict[fx.Node, str] = {}
    for node in module.graph.nodes:
        if "_c10d_functional" in str(node.target) and node.args[-1] in options.groups:
            axes[node] = node.args[-1]
            node.args = (*node.args[:-1], options.groups[node.args[-1]])
    for node in module.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # kernels may return other strides than fake tensors
    if options.is_compiled:
        for in_place, out_of_place in OUT_OF_PLACE.items():
            for node in module.graph.find_nodes(op="call_function", target=in_place):
                node.target = out_of_place
        without_aliases(module.graph)
        module.recompile()
        run = _compile_graph(module, options.compile_backend, donated)
        return CompiledGraph(graph, run, donated)
    record = recorder.instrument(module.graph) if recorder else None
    collective = next((n for n in module.graph.nodes if "_c10d_functional" in str(n.target)), None)
    if collective is not None:  # so late, the exchange overlaps with compute
        with module.graph.inserting_before(collective):
            module.graph.call_function(finish_exchange)
    if options.comm_backend == "gloo":
        log_waits(module.graph, axes)
    use_bindings(module.graph)
    run = _locating_errors(_with_profiled_twin(module, graph), graph)
    return CompiledGraph(graph, record(run) if record else run, donated)


def _with_profiled_twin(module: fx.GraphModule, graph: TrainingGraph) -> BoxedFunction:
    """The generated function; while a profiler runs, one with ranges instead."""

    def function_of(code: fx.Graph) -> BoxedFunction:
        code.set_codegen(BoxedCodeGen())
        made = fx.GraphModule(module, code)
        # fx keeps the text of generated code for ever, also of programs that the cache has dropped
        forget_code_with(made)
        return made.forward

    plain = function_of(module.graph)
    with_ranges_once = functools.cache(
        lambda: function_of(with_ranges(module.graph, range_names(graph)))
    )

    def run(arguments: list[Any]) -> list[Any]:
        return (with_ranges_once() if profiler_is_on() else plain)(arguments)

    return run


def _locating_errors(run: BoxedFunction, graph: TrainingGraph) -> BoxedFunction:
    """The generated function; its errors name the operator and the user's line."""
    nodes = {node.name: node for node in graph.graph.nodes}

    def run_located(arguments: list[Any]) -> list[Any]:
        try:
            with skip_autograd():  # it would look for gradients at every operator
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


def _compile_graph(
    module: fx.GraphModule, backend: str, donated: Sequence[int] = ()
) -> BoxedFunction:
    """Compiles a graph."""
    if backend == "inductor":
        return _compile_with_inductor(_with_boxed_arguments(module), donated)
    compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)

    def run(arguments: list[Any]) -> list[Any]:
        values = tuple(arguments)
        arguments.clear()
        with torch.no_grad():
            return list(compiled(*values))

    return run


def _donated_args(forward: TrainingGraph, backward: TrainingGraph) -> tuple[int, ...]:
    """Positions of saved tensors of a backward whose storage nothing else uses."""
    saved = dict(zip(forward.outputs, forward.results, strict=True))
    owners = Counter(storage_owner(node) for node in forward.results if node is not None)
    return tuple(
        place
        for place, role in enumerate(backward.inputs)
        if (node := saved.get(role)) is not None  # type: ignore[arg-type]
        and owners[owner := storage_owner(node)] == 1
        and _is_aten_result(owner)
    )


def _is_aten_result(node: fx.Node) -> bool:
    """Whether an aten operator allocated a value; collectives keep references to buffers."""
    target = sequence_of(node).target
    return isinstance(target, OpOverload) and target.namespace in ("aten", "prims")


def _with_boxed_arguments(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph with one list as its argument, which it may empty."""
    graph = fx.Graph()
    arguments = graph.placeholder("arguments")
    # inductor empties a list with this mark, so that each tensor is freed after its last use
    arguments.meta["steal_arg"] = True
    placeholders = module.graph.find_nodes(op="placeholder")
    items = {n: graph.call_function(getitem, (arguments, i)) for i, n in enumerate(placeholders)}
    graph.output(graph.graph_copy(module.graph, items))
    return fx.GraphModule(module, graph)


def _compile_with_inductor(module: fx.GraphModule, donated: Sequence[int]) -> BoxedFunction:
    """Compiles at the first call with each set of strides, which inductor specializes on.

    torch.compile would keep every argument alive until the end of the call.
    """
    compiled: dict[Any, Callable[[list[Any]], Any]] = {}

    def run(arguments: list[Any]) -> list[Any]:
        strides = tuple(value.stride() for value in arguments)
        with torch.no_grad():
            if strides not in compiled:
                compiled[strides] = inductor_compile(module, arguments, donated)
            return list(compiled[strides](arguments))

    return run
