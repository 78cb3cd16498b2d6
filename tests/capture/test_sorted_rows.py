"""Sorts that are undone: experts' rows stay in place, and other orders are kept."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.ir.graph import TrainingGraph
from autopar.core.operators.experts import expert_mm
from autopar.passes.pipeline import build_pass_pipeline
from tests.harness.architectures import EXPERTS, Double
from tests.passes.parity import World, assert_parity

EXACT = 1e-10  # sums over experts are in another order


def targets(graph: TrainingGraph) -> set[str]:
    """Names of the operators of a graph."""
    return {str(node.target) for node in graph.calls()}


def lowered(world: World, zero: int) -> list[TrainingGraph]:
    plan = world.plan(zero)
    return world.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))


@pytest.mark.parametrize("name", EXPERTS)
def test_rows_of_a_batch_are_routed_by_themselves(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is a test extra")
    warnings.simplefilter("ignore")
    world = World(EXPERTS[name].make(), ((), EXPERTS[name].batch(5)), ranks=2)
    for zero in (0, 3):
        graphs = lowered(world, zero)
        assert str(expert_mm) in targets(graphs[0])
        assert not targets(graphs[0]) & {"aten.sort.default", "aten.searchsorted.Tensor"}
        assert not any("needs all rows" in note for note in graphs[0].notes), graphs[0].notes
        assert_parity(world, graphs, EXACT)


class Routed(nn.Module):
    """A layer of experts, whose forward a test gives."""

    def __init__(self, forward: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(6, 4)
        self.up, self.down = nn.Parameter(torch.rand(4, 6, 8)), nn.Parameter(torch.rand(4, 8, 6))
        self.does = (forward,)

    def forward(self, x: Tensor) -> Tensor:
        weights, experts = self.gate(x).softmax(-1).topk(2)
        with Double():
            made = self.does[0](self, x, weights.view(-1), experts.view(-1))
        return made.square().mean()


def ends_of(experts: Tensor, count: int = 4) -> Tensor:
    return torch.bincount(experts, minlength=count).cumsum(0, dtype=torch.int32)


def added_back(model: Routed, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Rows gathered, scaled before the experts and added back, as other libraries do."""
    order = experts.argsort(stable=True)
    index = (order // 2).view(-1, 1).expand(-1, x.shape[1])
    rows = x.gather(0, index) * weights[order].unsqueeze(-1)
    ends = ends_of(experts)
    hidden = F.grouped_mm(rows, model.up, offs=ends).relu()
    return torch.zeros_like(x).scatter_add(0, index, F.grouped_mm(hidden, model.down, offs=ends))


def inverse_by_sort(model: Routed, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    ordered, order = experts.sort()
    rows = x.repeat_interleave(2, 0)[order]
    rows = F.grouped_mm(rows, model.up, offs=ends_of(ordered)).tanh()
    rows = F.grouped_mm(rows, model.down, offs=ends_of(ordered))[order.argsort()]
    return (rows * weights[:, None]).view(-1, 2, x.shape[1]).sum(1)


def first_in_order(model: Routed, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Experts drop all rows but the first in order: which these are depends on the sort."""
    order = experts.argsort(stable=True)
    rows = F.grouped_mm(x[order // 2], model.up, offs=ends_of(experts))
    kept = rows * (torch.arange(len(order)) < 5)[:, None]
    return F.grouped_mm(kept, model.down, offs=ends_of(experts)) * weights[order, None]


def other_groups(model: Routed, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
    """Groups are ended by numbers other than those that are sorted."""
    order = experts.argsort(stable=True)
    rows = F.grouped_mm(x[order // 2], model.up, offs=ends_of((experts + 1) % 4))
    made = F.grouped_mm(rows, model.down, offs=ends_of(experts))
    return torch.zeros_like(x).index_add(0, order // 2, made * weights[order, None])


@pytest.mark.parametrize(
    ("forward", "undone"),
    [(added_back, True), (inverse_by_sort, True), (first_in_order, False), (other_groups, False)],
)
def test_only_orders_that_do_not_matter_are_undone(forward: Any, undone: bool) -> None:
    world = World(Routed(forward).double(), ((torch.randn(5, 6).double(),), {}), ranks=2)
    graphs = lowered(world, 0)
    assert any("aten.sort" in name for name in targets(graphs[0])) != undone
    assert_parity(world, graphs, EXACT)
