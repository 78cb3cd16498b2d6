"""`TrainingGraph` as a value: roles, copies, results, text."""

import pytest
import torch
from torch import fx

from autopar.core.ir.graph import (
    TrainingGraph,
    elements,
    has_batch_dim,
    render_node,
    source_line,
    tensor_bytes,
    tensors,
)
from autopar.core.ir.roles import Gradient, Input, Output, Parameter, UnreducedGrad
from tests.passes.golden import two_layers


@pytest.fixture
def graph() -> TrainingGraph:
    return two_layers().graph(0)


def named(graph: TrainingGraph, name: str) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.name == name)


def test_roles_lead_to_nodes(graph: TrainingGraph) -> None:
    weight = Parameter("blocks.0.weight")
    assert str(graph.placeholder(weight)) == "primals_1"
    assert str(graph.result(Gradient(weight))) == "t_8"
    assert str(graph.result(Output(0))) == "getitem"
    assert graph.placeholder(Input(7)) is None
    assert graph.result(UnreducedGrad("blocks.0.weight")) is None
    assert len(graph.placeholders) == len(graph.inputs)


def test_backward_starts_behind_the_last_forward_operator(graph: TrainingGraph) -> None:
    assert str(graph.backward_start) == "expand"
    phases = [node.meta["phase"] for node in graph.calls()]
    start = phases.index("backward")
    assert set(phases[:start]) == {"forward"}
    assert set(phases[start:]) == {"backward"}


def test_a_copy_can_be_changed_alone(graph: TrainingGraph) -> None:
    before = str(graph)
    copy = graph.copy()
    assert str(copy) == before
    node = named(copy, "tanh")
    node.meta["phase"] = "backward"
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    copy.graph.erase_node(node)
    assert str(graph) == before
    assert named(graph, "tanh").meta["phase"] == "forward"


def test_results_are_replaced_in_place_and_added_at_the_end(graph: TrainingGraph) -> None:
    graph = graph.copy()
    changed = graph.with_results(
        {Output(0): named(graph, "mm"), UnreducedGrad("x"): named(graph, "mm_1")}
    )
    assert changed.outputs == (*graph.outputs, UnreducedGrad("x"))
    assert [str(node) for node in changed.results] == ["mm", "t_8", "t_5", "mm_1"]


def test_text_has_provenance_phases_types_and_the_users_lines(graph: TrainingGraph) -> None:
    lines = str(graph).splitlines()
    assert lines[0] == "# captured from TwoLayers"
    assert "  primals_3: float64[2, 4] = input Input(index=0)" in lines
    forward, backward = lines.index("forward:"), lines.index("backward:")
    (mm,) = [i for i, line in enumerate(lines) if line.startswith("  mm: float64[2, 3] = ")]
    assert forward < mm < backward
    assert "aten.mm.default(%primals_3, %t)  # golden.py:" in lines[mm]
    assert lines[mm].endswith("torch.tanh(self.blocks[0](x))).square().mean()")
    assert "  -> Gradient(of=Parameter(name='blocks.0.weight')) = t_8" in lines


def test_a_backward_operator_names_the_line_of_its_forward(graph: TrainingGraph) -> None:
    assert source_line(named(graph, "tanh_backward")) == source_line(named(graph, "tanh"))
    assert "torch.tanh" in source_line(named(graph, "tanh"))


def test_what_a_node_yields() -> None:
    node = fx.Graph().placeholder("x")
    node.meta = {"val": (torch.empty(2, 3), None), "batch_dims": ((0,), ())}
    assert elements(node)[1] is None
    (only,) = tensors(node)
    assert tensor_bytes(only) == 24
    assert has_batch_dim(node)
    assert render_node(node).startswith("x: float32[2, 3]")


def test_parameters_know_their_block_and_size(graph: TrainingGraph) -> None:
    info = graph.parameters["blocks.0.weight"]
    assert (info.shape, info.bytes, info.block) == ((3, 4), 96, "blocks.0")
