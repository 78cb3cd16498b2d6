import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from autopar.passes.core.runner import run_passes
from autopar.passes.memory.fuse_cross_entropy import FuseCrossEntropy
from autopar.passes.pipeline import build_pass_pipeline
from tests.passes.golden import changes, two_layers
from tests.passes.parity import World, assert_parity


class Classifier(nn.Module):
    """A linear layer under cross-entropy."""

    def __init__(self, reduction: str = "mean", weight: Tensor | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.reduction, self.weight = nn.Linear(4, 5, bias=False), reduction, weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(x), y, self.weight, reduction=self.reduction)


def world(model: nn.Module, ranks: int, targets: list[int]) -> World:
    x = torch.randn(len(targets), 4, dtype=torch.float64)
    return World(model.double(), ((x, torch.tensor(targets)), {}), ranks)


def test_graph() -> None:
    graph = world(Classifier(), 1, [0, 3]).graph(0)
    after = run_passes(graph, [FuseCrossEntropy()])
    lines = changes(graph, after).splitlines()
    assert_expected_inline(
        "\n".join(line for line in lines if not line.startswith("-")),
        """\
+ ne_scalar: [2] = ne(in1, -100)
+ mul_tensor: [2] = mul(in1, ne_scalar)
+ div_tensor: [] = div(tangent0, getitem_1)
+ where_scalar_other: [2] = where(ne_scalar, div_tensor, 0)
+ unsqueeze_default: [2,1] = unsqueeze(where_scalar_other, 1)
+ unsqueeze_default_1: [2,1] = unsqueeze(mul_tensor, 1)
+ exp_default: [2,5] = exp(_log_softmax)
+ mul__tensor: [2,5] = mul_(exp_default, unsqueeze_default)
+ neg_default: [2,1] = neg(unsqueeze_default)
+ scatter_add__default: [2,5] = scatter_add_(mul__tensor, 1, unsqueeze_default_1, neg_default)
~ t_1: [5,2] = t(scatter_add__default)""",
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("targets", [[0, 3, 2, 1, 4], [0, -100, -100, -100, -100]])
def test_equals_the_plain_model(reduction: str, targets: list[int]) -> None:
    item = world(Classifier(reduction), 2, targets)
    plan = item.plan(0)
    graphs = item.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))
    assert not any("nll_loss_backward" in str(node.target) for node in graphs[0].calls())
    assert_parity(item, graphs)


def test_class_weights_are_left_alone() -> None:
    model = Classifier(weight=torch.rand(5, dtype=torch.float64))
    result = FuseCrossEntropy()(world(model, 1, [0, 3]).graph(0))
    assert result.reason
    assert result.reason == "there is no backward of cross-entropy"


def test_declines_without_cross_entropy() -> None:
    assert FuseCrossEntropy()(two_layers(1).graph(0)).reason
