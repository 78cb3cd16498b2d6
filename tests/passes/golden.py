"""Graphs as short text for golden tests, and the two-layer model that they show.

Inputs go by their role (`blocks.0.weight`, `in0`, `tangent0`), operators by their bare name.
"""

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.roles import (
    BatchFraction,
    Buffer,
    Input,
    InputRole,
    OutputRole,
    Parameter,
    Saved,
    Tangent,
)
from tests.passes.parity import World


class TwoLayers(nn.Module):
    """Two linear layers, each a block, and a loss."""

    def __init__(self, width: int = 3, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, width, bias), nn.Linear(width, 2, bias)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x))).square().mean()


def two_layers(ranks: int = 2, rows: int = 4, **options: int) -> World:
    """TwoLayers in float64 on some ranks."""
    x = torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return World(TwoLayers(**options).double(), ((x,), {}), ranks)


def text(graph: TrainingGraph, keep: Callable[[fx.Node], bool] = lambda node: True) -> str:
    """One line a node, of those that `keep` names."""
    lines = _lines(graph)
    return "\n".join([line for node, line in lines.items() if keep(node)])


def order(graph: TrainingGraph, keep: Callable[[fx.Node], bool] = lambda node: True) -> str:
    """Only the names of operators, in the order that they run."""
    names = _names(graph)
    return "\n".join(
        f"{node.meta['phase'][0]} {names[node]}" for node in graph.calls() if keep(node)
    )


def changes(before: TrainingGraph, after: TrainingGraph) -> str:
    """What a pass did: lines that are new (+), gone (-) or otherwise than before (~)."""
    old = {node.name: line for node, line in _lines(before).items()}
    lines = []
    for node, line in _lines(after).items():
        if line != old.get(node.name):
            lines.append(f"{'~' if node.name in old else '+'} {line}")
    left = {node.name for node in after.graph.nodes}
    lines += [f"- {line}" for name, line in old.items() if name not in left]
    results = dict(zip(before.outputs, before.results, strict=True))
    names = _names(after)
    for role, node in zip(after.outputs, after.results, strict=True):
        if node is not None and (role not in results or results[role].name != node.name):
            lines.append(f"-> {_role(role)} = {names[node]}")
    return "\n".join(lines)


def _lines(graph: TrainingGraph) -> dict[fx.Node, str]:
    names = _names(graph)
    return {node: _line(node, names) for node in graph.graph.nodes if node.op != "output"}


def _line(node: fx.Node, names: dict[fx.Node, str]) -> str:
    shapes = " ".join(str(list(t.shape)).replace(" ", "") for t in tensors(node))
    type_ = " ".join(filter(None, [shapes, str(node.meta.get("placement") or "")]))
    if node.op == "placeholder":
        return f"{names[node]}: {type_}"
    values = [_argument(a, names) for a in node.args]
    values += [f"{k}={_argument(v, names)}" for k, v in node.kwargs.items()]
    return f"{names[node]}: {type_} = {_target(node)}({', '.join(values)})"


def _target(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _argument(value: object, names: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(v, names) for v in value) + "]"
    return str(value)


def _names(graph: TrainingGraph) -> dict[fx.Node, str]:
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    return {n: _role(roles[n]) if n in roles else n.name for n in graph.graph.nodes}


def _role(role: InputRole | OutputRole) -> str:
    match role:
        case Parameter(name) | Buffer(name):
            return name
        case Saved(name):
            return f"saved {name}"
        case Input(index):
            return f"in{index}"
        case Tangent(index):
            return f"tangent{index}"
        case BatchFraction():
            return "weight"
    kind, of = type(role).__name__.lower(), getattr(role, "of", None)
    label = _role(of) if of else getattr(role, "name", getattr(role, "index", ""))
    return f"{kind} {label}".strip()
