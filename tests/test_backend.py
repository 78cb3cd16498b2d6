"""torch.compile(model, backend="autopar")."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.harness.worlds import run

RESOLVES = """
import sys, torch
assert "autopar" not in sys.modules
model = torch.compile(torch.nn.Linear(2, 2), backend="autopar")
print(model(torch.ones(1, 2)).shape)
"""


@pytest.mark.slow
def test_resolves_without_an_import() -> None:
    done = subprocess.run([sys.executable, "-c", RESOLVES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([1, 2])" in done.stdout


class Broken(nn.Module):
    """Two layers with a graph break between; one parameter is used on both sides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(h).square().mean()


def trained(rank: int, world_size: int) -> list[list[Tensor]]:
    models = [torch.compile(Broken().double(), backend="autopar")]
    models.append(DistributedDataParallel(Broken().double()))
    results = []
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(step * 10 + rank))
            model(rows.double()).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    return results


def test_equals_ddp_across_a_graph_break() -> None:
    for compiled, ddp in run(trained, 2):
        assert compiled
        for have, want in zip(compiled, ddp, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-12)
