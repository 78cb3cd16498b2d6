"""Small training graphs written by hand."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autopar._torch import FakeTensorMode
from autopar.core.ir.graph import ParameterInfo, TrainingGraph
from autopar.core.ir.roles import InputRole, OutputRole, Parameter

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Sketch:
    """A graph under construction: `take` its inputs, `call` its operators, `give` its outputs."""

    def __init__(self, **axes: int) -> None:
        self.axes = axes
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.inputs: list[InputRole] = []
        self.parameters: dict[str, ParameterInfo] = {}
        self.phase = "forward"

    def take(
        self, role: InputRole, *shape: int, trained: bool = True, device: str = "cpu"
    ) -> fx.Node:
        """A float32 placeholder."""
        node = self.graph.placeholder(f"in{len(self.inputs)}")
        with self.mode:
            self._note(node, torch.empty(shape, device=device))
        self.inputs.append(role)
        if isinstance(role, Parameter):
            info = ParameterInfo(role.name, shape, torch.float32, trained, "")
            self.parameters[role.name] = info
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """An operator, its value computed on fake tensors."""
        name = str(target).split(".")[1] if "." in str(target) else None
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        values, options = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            self._note(node, target(*values, **options))
        return node

    def give(self, outputs: Mapping[OutputRole, fx.Node]) -> TrainingGraph:
        """The finished graph."""
        self._note(self.graph.output(list(outputs.values())), None)
        return TrainingGraph(
            self.graph, tuple(self.inputs), tuple(outputs), self.parameters, self.axes
        )

    def _note(self, node: fx.Node, val: Any) -> None:
        node.meta = {"val": val, "phase": self.phase, "block": "", "source": None, "seq_nr": None}
