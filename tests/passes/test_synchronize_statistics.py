"""The graph after `synchronize_statistics`; its numbers are in test_statistics_rules.py."""

import pytest
from expecttest import assert_expected_inline
from torch import Tensor

from autopar.errors import CaptureError
from autopar.passes.runner import run_passes
from autopar.passes.synchronize_statistics import SynchronizeStatistics
from tests.passes.golden import TwoLayers, text, two_layers
from tests.passes.parity import AXIS, World


class Normalised(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        z = self.blocks[0](x)
        return self.blocks[1](z - z.mean(0)).abs().sum() / x.shape[0]


class OneByOne(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return sum(super(OneByOne, self).forward(row[None]) for row in x) / len(x)  # type: ignore


def world(model: type[TwoLayers], rows: int) -> World:
    return World(model().double(), two_layers(rows=rows).batch, 2)


def test_types_and_the_loss() -> None:
    """Gradients are Partial; the loss is weighed, its gradient divided by all elements."""
    graph = run_passes(two_layers().graph(0), [SynchronizeStatistics(AXIS)])
    assert_expected_inline(
        text(graph),
        """\
blocks.0.weight: [3,4] R
blocks.1.weight: [2,3] R
in0: [2,4] V
tangent0: [] R
weight: [] V
evidence: [4] P(sum)
start_all_reduce_1: [4] R = start_all_reduce([evidence], dp)
wait_1: [4] R = wait(start_all_reduce_1)
getitem_1: [4] R = getitem(wait_1, 0)
t: [4,3] R = t(blocks.0.weight)
mm: [2,3] V = mm(in0, t)
tanh: [2,3] V = tanh(mm)
t_1: [3,2] R = t(blocks.1.weight)
mm_1: [2,2] V = mm(tanh, t_1)
pow_1: [2,2] V = pow(mm_1, 2)
mean: [] V = mean(pow_1)
mul_tensor: [] P(sum) = mul(mean, weight)
start_all_reduce: [] R = start_all_reduce([mul_tensor], dp)
wait: [] R = wait(start_all_reduce)
getitem: [] R = getitem(wait, 0)
expand: [2,2] V = expand(tangent0, [2, 2])
div: [2,2] V = div(expand, 8)
pow_2: [2,2] V = pow(mm_1, 1.0)
mul: [2,2] V = mul(pow_2, 2.0)
mul_1: [2,2] V = mul(div, mul)
t_2: [2,2] V = t(mul_1)
mm_2: [2,3] P(sum) = mm(t_2, tanh)
t_3: [3,2] P(sum) = t(mm_2)
t_4: [2,3] R = t(t_1)
mm_3: [2,3] V = mm(mul_1, t_4)
t_5: [2,3] P(sum) = t(t_3)
tanh_backward: [2,3] V = tanh_backward(mm_3, tanh)
t_6: [3,2] V = t(tanh_backward)
mm_4: [3,4] P(sum) = mm(t_6, in0)
t_7: [4,3] P(sum) = t(mm_4)
t_8: [3,4] P(sum) = t(t_7)""",
    )


def test_statistics_inside() -> None:
    """The mean is reduced and so is its gradient; the sum is divided by the global rows."""
    before = world(Normalised, rows=4).graph(0)
    graph = run_passes(before, [SynchronizeStatistics(AXIS)])
    old = {node.name for node in before.graph.nodes} - {"div", "div_1", "div_2"}
    assert_expected_inline(
        text(graph, lambda node: node.name not in old),
        """\
weight: [] V
evidence: [4] P(sum)
start_all_reduce_3: [4] R = start_all_reduce([evidence], dp)
wait_3: [4] R = wait(start_all_reduce_3)
getitem_3: [4] R = getitem(wait_3, 0)
mul_tensor: [3] P(sum) = mul(mean, weight)
start_all_reduce: [3] R = start_all_reduce([mul_tensor], dp)
wait: [3] R = wait(start_all_reduce)
getitem: [3] R = getitem(wait, 0)
start_all_reduce_1: [] R = start_all_reduce([sum_1], dp)
wait_1: [] R = wait(start_all_reduce_1)
getitem_1: [] R = getitem(wait_1, 0)
div: [] R = div(getitem_1, 4)
div_1: [] R = div(tangent0, 4)
start_all_reduce_2: [1,3] R = start_all_reduce([unsqueeze], dp)
wait_2: [1,3] R = wait(start_all_reduce_2)
getitem_2: [1,3] R = getitem(wait_2, 0)
div_2: [2,3] V = div(expand_1, 4)""",
    )


def test_a_graph_that_differs_by_rows_is_noted() -> None:
    graph = run_passes(world(OneByOne, rows=4).graph(0), [SynchronizeStatistics(AXIS)])
    assert "the graph differs between 2 and 3 rows" in graph.notes[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_whose_graphs_would_differ_decline_alike(rank: int) -> None:
    with pytest.raises(CaptureError, match="not do the same for 1 and 2 rows"):
        world(OneByOne, rows=3).graph(rank)
