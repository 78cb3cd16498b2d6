"""FlexAttention: as torch computes it, with its gradients, divided over ranks."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from autopar.core.ir.placement import Shard
from autopar.errors import AutoparWarning
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.passes.partitions import captured, partitioned, whole

ROWS, LENGTH = 2, 128


class Alibi(nn.Module):
    """Scores less a slope for each head; keys after the query are masked."""

    def __init__(self, mask: BlockMask | None) -> None:
        super().__init__()
        self.project, self.mask = nn.Linear(16, 48), mask
        self.register_buffer("slopes", torch.rand(4))

    def lowered(self, score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - self.slopes[h] * (i - j)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (-1, 4)).transpose(1, 2).split([4, 4, 4], 1)
        out = flex_attention(q, k, v, score_mod=self.lowered, block_mask=self.mask)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(-2).square().mean()


def formula(model: Alibi, x: Tensor) -> Tensor:
    """The same by plain operators."""
    q, k, v = model.project(x).unflatten(-1, (-1, 4)).transpose(1, 2).split([4, 4, 4], 1)
    i = torch.arange(LENGTH)
    scores = q @ k.mT / 2.0 - model.slopes.view(-1, 1, 1) * (i[:, None] - i)
    if model.mask is not None:
        scores = scores.masked_fill(i[:, None] < i, -torch.inf)
    return (scores.softmax(-1) @ v).square().mean()


@pytest.mark.parametrize("masked", [False, True])
def test_is_divided_with_its_score_modification_and_mask(masked: bool) -> None:
    mask = None
    if masked:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, "cpu")
    model = Alibi(mask).double()
    x = torch.randn(ROWS, LENGTH, 16, dtype=torch.float64)
    with pytest.warns(AutoparWarning, match="FlexAttention is captured as its dense formula"):
        graph, values = captured(model, ((x,), {}), 2)
    loss = formula(model, x)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    one = whole(graph, values)
    for wanted, value in zip((loss, *gradients), one.values(), strict=True):
        torch.testing.assert_close(value, wanted.detach(), rtol=1e-12, atol=1e-14)
    strategies = partition_by_bytes(graph, 2, {"project.weight": Shard(0, 3)})
    assert any(name.startswith("_safe_softmax") for name, _ in strategies)
    for role, value in partitioned(graph, 2, strategies, values).items():
        torch.testing.assert_close(value, one[role], rtol=1e-12, atol=1e-14)
