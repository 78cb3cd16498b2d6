"""Views that are identities go, and the graph computes what it did, bit for bit."""

import pytest
import torch

from autopar.core.ir.roles import Gradient, Output
from autopar.passes.core.node_builder import aten
from autopar.passes.fold_views import fold_views
from autopar.passes.pipeline import build_pass_pipeline
from tests.harness.models import MODELS
from tests.passes.parity import World


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "conv", "odd", "encoder"])
@pytest.mark.parametrize("stage", [0, 3])
def test_folded_graphs_compute_the_same_bits(name: str, stage: int) -> None:
    case = MODELS[name]
    it = World(case.make(), case.batch(6, 0), 2, case.loss)
    plan = it.plan(stage)
    graphs = it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))
    folded = [fold_views(graph) for graph in graphs]
    assert all(len(a.graph.nodes) > len(b.graph.nodes) for a, b in zip(graphs, folded, strict=True))
    for want, got in zip(it.run(graphs), it.run(folded), strict=True):
        assert want.keys() == got.keys()
        for role, tensor in want.items():
            other = got[role]
            assert (tensor is None) == (other is None)
            assert tensor is None or torch.equal(tensor, other), role  # type: ignore[arg-type]


def test_gradients_of_a_linear_layer_are_not_transposed_twice() -> None:
    case = MODELS["gpt"]
    it = World(case.make(), case.batch(6, 0), 2)
    plan = it.plan(0)
    graph = fold_views(it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))[0])
    twice = [n for n in graph.calls() if n.target is aten.t.default]
    assert all(n.all_input_nodes[0].target is not aten.t.default for n in twice)
    outputs = [n for r, n in zip(graph.outputs, graph.results, strict=True) if type(r) is Output]
    assert len(outputs) == len(set(outputs))
    assert any(isinstance(role, Gradient) for role in graph.outputs)
