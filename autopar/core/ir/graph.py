"""`TrainingGraph`: forward and backward of one rank as one fx graph, with roles of its inputs.

The graph is in execution order, forward nodes first. Every node carries in `meta`:

- `val`: fake tensor of the result, or a tuple of fake tensors;
- `phase`: "forward" or "backward";
- `block`: repeated block of the model, "" outside of any;
- `source`: (file, line) of the user's code, None if unknown;
- `seq_nr`: autograd's sequence number, shared by a forward operator and its backward;
- `stage`: pipeline stage, after `place_stages`;
- `batch_dims`: batch dims of each result (several ranks only);
- `placement`: placement of the result over the data axis, after propagation.

Passes do not modify their input: they copy it (`TrainingGraph.copy`) and return a new graph.
"""

from __future__ import annotations

import enum
import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensor, FakeTensorMode, OpOverload, copy_graph, format_argument
from autopar.core.ir.placement import AxisShard, Placement
from autopar.core.ir.roles import Gradient, InputRole, OutputRole, Parameter, Tangent


@dataclass(frozen=True)
class ParameterInfo:
    """Name, global shape, dtype and repeated block of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    block: str

    @property
    def bytes(self) -> int:
        """Size of the unsharded parameter in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class GraphProperty(enum.Enum):
    """Property of a graph that passes require or establish."""

    BATCH_SHARDED = "rows are sharded over the data axis, and gradients are partial sums"
    PARAMETERS_SHARDED = "parameters have the placements of `layouts`, and are gathered before use"
    GRADIENTS_SYNCHRONIZED = "gradients are reduced, with the placements of their parameters"
    COLLECTIVES_BUCKETED = "each bucket has one collective"
    COLLECTIVES_LOWERED = "collectives of the lowered axes are operators of torch"
    AXES_PARTITIONED = "parameters and values are one rank's parts along partitioned axes"
    ACTIVATIONS_OFFLOADED = "chosen activations are on storage between forward and backward"
    PARAMETERS_OFFLOADED = "large parameters are on storage, and are read before their uses"
    STAGES_PLACED = "every operator has its stage of the pipeline"


@dataclass(frozen=True)
class TrainingGraph:
    """Forward and backward of one rank.

    Attributes:
        inputs: role of every placeholder, in order.
        outputs: role of every output, in order; an output may be None (no gradient).
        parameters: every parameter of the model by name, tied ones once.
        axes: size of every mesh axis that the graph communicates over, and of its levels
            (`autopar.core.ir.mesh_levels`).
        partitioned: axes that the graph is partitioned along, with explicit redistributions.
        layouts: placement of every parameter that is not replicated between steps.
        constants: tensors created by the model's code, by the name of their get_attr.
        history: one line per applied pass, for the user.
        notes: limitations to show to the user.
        disposable: whether `copy` may return the fx graph itself, because nothing else uses it.
        output_shards: divisions, one after the other, of each output that is returned in parts.
        is_uneven: whether ranks have parts of other sizes of some value, or may have in a step.
    """

    graph: fx.Graph
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    parameters: Mapping[str, ParameterInfo]
    axes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    partitioned: tuple[str, ...] = ()
    layouts: Mapping[str, Placement] = field(default_factory=lambda: MappingProxyType({}))
    constants: Mapping[str, torch.Tensor] = field(default_factory=lambda: MappingProxyType({}))
    properties: frozenset[GraphProperty] = frozenset()
    history: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    disposable: bool = False
    output_shards: Mapping[int, tuple[AxisShard, ...]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    is_uneven: bool = False

    def copy(self) -> TrainingGraph:
        """A copy that shares no nodes with this graph."""
        graph = self.graph if self.disposable else copy_graph(self.graph)
        return replace(self, graph=graph, disposable=False)

    @property
    def fake_mode(self) -> FakeTensorMode:
        sample = next(t for node in self.placeholders for t in tensors(node))
        assert isinstance(sample, FakeTensor)
        return sample.fake_mode

    @property
    def output_node(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    @property
    def results(self) -> tuple[fx.Node | None, ...]:
        """The returned node of each role in `outputs`."""
        return tuple(self.output_node.args[0])  # type: ignore[arg-type]

    @property
    def placeholders(self) -> tuple[fx.Node, ...]:
        """The placeholder of each role in `inputs`."""
        return tuple(self.graph.find_nodes(op="placeholder"))

    def placeholder(self, role: InputRole) -> fx.Node | None:
        return self.placeholders[self.inputs.index(role)] if role in self.inputs else None

    def result(self, role: OutputRole) -> fx.Node | None:
        return self.results[self.outputs.index(role)] if role in self.outputs else None

    @property
    def trained_bytes(self) -> dict[str, int]:
        """Bytes of this rank's part of each trained parameter, by name."""
        return {
            role.name: tensor_bytes(tensors(node)[0])
            for role, node in zip(self.inputs, self.placeholders, strict=True)
            if isinstance(role, Parameter) and self.parameters[role.name].requires_grad
        }

    def calls(self) -> Iterator[fx.Node]:
        """The operators, in execution order."""
        return (node for node in self.graph.nodes if node.op == "call_function")

    @property
    def backward_start(self) -> fx.Node:
        """The first operator of the backward, or the output node if there is none."""
        for node in self.calls():
            if node.meta["phase"] == "backward":
                return node
        return self.output_node

    def outputs_by_gradient(self) -> dict[str | int, frozenset[int]]:
        """Indices of the outputs whose gradients each gradient is made of.

        The key is the name of the parameter, or the index of the input.
        """
        outputs: dict[fx.Node, frozenset[int]] = {}
        roles = dict(zip(self.placeholders, self.inputs, strict=True))
        for node in self.graph.nodes:
            role = roles.get(node)
            index = {role.index} if isinstance(role, Tangent) else set()
            outputs[node] = frozenset(index).union(*(outputs[n] for n in node.all_input_nodes))
        return {
            role.key: outputs[node]
            for role, node in zip(self.outputs, self.results, strict=True)
            if isinstance(role, Gradient) and node is not None
        }

    def with_results(
        self, results: Mapping[OutputRole, fx.Node | None], **changes: object
    ) -> TrainingGraph:
        """This graph, changed in place, with new results for some roles; new roles come last."""
        table = dict(zip(self.outputs, self.results, strict=True)) | dict(results)
        self.output_node.args = (list(table.values()),)
        return replace(self, outputs=tuple(table), **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True)
class Value:
    """A tensor of a graph: the result of a node with this index."""

    node: fx.Node
    index: int = 0

    @property
    def tensor(self) -> Any:
        return elements(self.node)[self.index]


def operands(node: fx.Node) -> list[fx.Node]:
    """Nodes among the arguments, in order, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), found.append)
    return found


def elements(node: fx.Node) -> tuple[Any, ...]:
    """The fake tensors of a node's results; None for absent ones and for numbers."""
    val = node.meta.get("val")
    found = val if isinstance(val, (tuple, list)) else (val,)
    return tuple(v if isinstance(v, torch.Tensor) else None for v in found)


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The fake tensors among a node's results."""
    return tuple(v for v in elements(node) if isinstance(v, torch.Tensor))


def has_batch_dim(node: fx.Node) -> bool:
    """Whether some result of a node has a batch dim."""
    return any(node.meta.get("batch_dims") or ())


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor whose dims have the memory order of the strides `like`.

    Expanded dims keep stride 0.
    """
    strides, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        if like[dim]:
            strides[dim], size = size, size * shape[dim]
    return tuple(strides)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; its storage may be larger."""
    return tensor.numel() * tensor.element_size()


def render(graph: TrainingGraph) -> str:
    """Text of a graph: history and notes, then one line per node."""
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    lines = [f"# {line}" for line in graph.history]
    lines += [f"# note: {line}" for line in graph.notes]
    phase = ""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.meta.get("phase") != phase:
            phase = node.meta["phase"]
            lines.append(f"{phase}:")
        lines.append("  " + render_node(node, roles.get(node)))
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if node is not None:
            lines.append(f"  -> {role} = {node}")
    return "\n".join(lines)


def source_text(source: tuple[str, int] | None) -> str:
    """Source line as `file:line: text`; "" for None."""
    if source is None:
        return ""
    file, number = source
    return f"{file.rpartition('/')[2]}:{number}: {linecache.getline(file, number).strip()}"


def source_line(node: fx.Node) -> str:
    """Line of the user's code for a node, as `file:line: text`; "" if unknown."""
    return source_text(node.meta.get("source"))


def render_node(node: fx.Node, role: InputRole | None = None) -> str:
    """Line of a node: name, type, operator, arguments and source line."""
    types = ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors(node))
    if node.op == "placeholder":
        return f"{node.name}: {types} = input {role}"
    if node.op == "output":
        return "return"
    arguments = ", ".join(
        [format_argument(a) for a in node.args]
        + [f"{k}={format_argument(v)}" for k, v in node.kwargs.items()]
    )
    source = source_line(node)
    target = getattr(node.target, "__name__", str(node.target))
    name = str(node.target) if isinstance(node.target, OpOverload) else target
    return f"{node.name}: {types} = {name}({arguments})" + (f"  # {source}" if source else "")
