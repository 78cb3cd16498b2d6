"""`TrainingGraph`: forward and backward of one rank as one fx graph whose inputs have roles.

The graph is in execution order, forward nodes first. Every node carries in `meta`:

- `val`: the fake tensor (or tuple of them) that it yields: shape, dtype, strides, device;
- `phase`: "forward" or "backward";
- `block`: the repeated block of the model that it came from ("" outside of any);
- `source`: the user's (file, line) that it came from, None if unknown;
- `seq_nr`: autograd's number shared by a forward operator and its backward;
- `stage`: the stage of a pipeline that it runs on, once placed;
- `batch_dims`: for each element that it yields, the dims that run over the rows of the batch (more
  than one rank only), and `placement`: how it lies over the data-parallel axis, once typed.

A graph is a value: passes copy it (`TrainingGraph.copy`) and return a new one.
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

from autopar._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    copy_graph,
    format_argument,
)
from autopar.ir.placement import Placement
from autopar.ir.roles import InputRole, OutputRole, Parameter


@dataclass(frozen=True)
class ParameterInfo:
    """What is known of a parameter: its whole shape, and the block that it belongs to."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    block: str

    @property
    def bytes(self) -> int:
        """Size of the whole parameter, in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class GraphProperty(enum.Enum):
    """A fact about a graph that passes require of it, and ensure for those behind them."""

    BATCH_SHARDED = "rows lie over the ranks of the data axis, and gradients are partial sums"
    PARAMETERS_SHARDED = "parameters lie as `layouts` says, gathered before their first use"
    GRADIENTS_SYNCHRONIZED = "gradients of parameters are whole sums, laid out as their parameters"
    COLLECTIVES_BUCKETED = "collectives of one bucket are one"
    COLLECTIVES_LOWERED = "collectives of the lowered axes are operators of torch"
    AXES_PARTITIONED = "parameters and values are one rank's parts along partitioned axes"
    STAGES_PLACED = "every operator has its stage of the pipeline"


@dataclass(frozen=True)
class TrainingGraph:
    """Forward and backward of one rank.

    Attributes:
        graph: the fx graph; placeholders in the order of `inputs`, outputs in that of `outputs`.
        inputs: the role of every placeholder.
        outputs: the role of every output; an output may be None (no gradient).
        parameters: every parameter of the model by name, tied ones once.
        axes: size of every mesh axis that the graph communicates over, and of the levels of these
            (see `levels`).
        partitioned: the axes that the graph was partitioned along: its parameters and values are
            one rank's parts, and all conversions between them are written.
        layouts: where it is not Replicate, how a parameter lies between steps.
        constants: tensors that the model made in its code, by the name of their get_attr.
        properties: facts that the passes applied so far ensure.
        history: one line for every pass applied, for people.
        notes: what passes declined to do, and limits the user should know of.
        free: whether nobody else looks at it any more, so that a copy is not needed.
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

    def copy(self) -> TrainingGraph:
        """The same graph, nodes and all, free to be changed."""
        own = self.graph if self.disposable else copy_graph(self.graph)
        return replace(self, graph=own, disposable=False)

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of the fake tensors that it was captured with."""
        sample = next(t for node in self.placeholders for t in tensors(node))
        assert isinstance(sample, FakeTensor)
        return sample.fake_mode

    @property
    def output_node(self) -> fx.Node:
        """The node that returns."""
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
        """The placeholder with this role."""
        return self.placeholders[self.inputs.index(role)] if role in self.inputs else None

    def result(self, role: OutputRole) -> fx.Node | None:
        """The returned node with this role."""
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

    def with_results(
        self, results: Mapping[OutputRole, fx.Node | None], **changes: object
    ) -> TrainingGraph:
        """This graph returning other nodes for some roles, and new roles after the old ones."""
        table = dict(zip(self.outputs, self.results, strict=True)) | dict(results)
        self.output_node.args = (list(table.values()),)
        return replace(self, outputs=tuple(table), **changes)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True)
class Value:
    """A tensor of a graph: one result of a node.

    Attributes:
        node: what makes it.
        place: which of its results.
    """

    node: fx.Node
    index: int = 0

    @property
    def tensor(self) -> Any:
        """Its fake tensor."""
        return elements(self.node)[self.index]


def operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order and as often as they occur."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, dict(node.kwargs)), found.append)
    return found


def elements(node: fx.Node) -> tuple[Any, ...]:
    """What a node yields, as a tuple: fake tensors, or None for results that it leaves out."""
    val = node.meta.get("val")
    return tuple(val) if isinstance(val, (tuple, list)) else (val,)


def tensors(node: fx.Node) -> tuple[torch.Tensor, ...]:
    """The fake tensors that a node yields, none if it yields no tensor."""
    return tuple(v for v in elements(node) if isinstance(v, torch.Tensor))


def has_batch_dim(node: fx.Node) -> bool:
    """Whether something that a node yields runs over the rows of the batch."""
    return any(node.meta.get("batch_dims") or ())


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of a shape, its dims in memory in the order of other strides.

    Dims of stride 0 keep it: they are expanded.
    """
    strides, size = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (like[d], -d)):
        if like[dim]:
            strides[dim], size = size, size * shape[dim]
    return tuple(strides)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of a tensor, not of the storage behind it."""
    return tensor.numel() * tensor.element_size()


def render(graph: TrainingGraph) -> str:
    """The program of one rank as text: provenance, then one line a node."""
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
    """A source line as `file:line: text`; "" for None."""
    if source is None:
        return ""
    file, number = source
    return f"{file.rpartition('/')[2]}:{number}: {linecache.getline(file, number).strip()}"


def source_line(node: fx.Node) -> str:
    """The user's line that a node comes from, as `file:line: text`; "" if unknown."""
    return source_text(node.meta.get("source"))


def render_node(node: fx.Node, role: InputRole | None = None) -> str:
    """One line for a node: name, type, what it computes, and the user's line."""
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
