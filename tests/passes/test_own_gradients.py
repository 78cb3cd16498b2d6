"""Gradients of a backward share memory with nothing else."""

import torch
from torch import Tensor, nn

from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Gradient
from autopar.passes.split_forward_backward import split_forward_backward


class Sums(nn.Module):
    """Parameters whose gradients are one tensor, slices of one, and the loss's own gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(3, 4)), nn.Parameter(torch.rand(3, 4))
        self.c, self.d = nn.Parameter(torch.rand(2, 3)), nn.Parameter(torch.rand(1, 3))
        self.e = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ (self.a + self.b)[:, :3] @ torch.cat([self.c, self.d])
        return h.square().mean() + self.e


def backward_of(model: nn.Module) -> TrainingGraph:
    split = split_forward_backward(capture_of_rank(model, torch.rand(2, 3), 0, 1))
    assert split.backward is not None
    return split.backward


def test_shared_gradients_are_copied() -> None:
    graph = backward_of(Sums())
    module = torch.fx.GraphModule({}, graph.graph)
    inputs = [torch.rand(node.meta["val"].shape) for node in graph.placeholders]
    results = dict(zip(graph.outputs, module(*inputs), strict=True))
    gradients = [x for role, x in results.items() if isinstance(role, Gradient)]
    assert len(gradients) == 5
    values = [x.clone() for x in (*gradients, *inputs)]
    for index, gradient in enumerate(gradients):
        gradient.add_(1)
        values[index] += 1
    for now, expected in zip((*gradients, *inputs), values, strict=True):
        assert torch.equal(now, expected)


def test_slices_of_one_tensor_are_not_copied() -> None:
    targets = [node.target for node in backward_of(Sums()).calls()]
    assert targets.count(torch.ops.aten.clone.default) == 2  # b's and e's
