"""Float8 layers, own ones and torchao's where it is installed, train under a plan as on one device.

Scales are by the largest number of the whole batch, so all ranks round alike. torchao's products
with scales of rows are rounded to bf16, partial sums too, and the next float8 may then be its
neighbour.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import fixed, whole
from tests.harness.worlds import run

WIDTH, ROWS = 32, 32
scaled_mm = torch.ops.aten._scaled_mm.default


def narrow(x: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor in float8, and the scale that it is multiplied by in a product."""
    scale = x.abs().max().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn), scale


def product(x: Tensor, y: Tensor) -> Tensor:
    (a, a_scale), (b, b_scale) = narrow(x), narrow(y)
    b = b.t().contiguous().t()
    return scaled_mm(a.contiguous(), b, a_scale, b_scale, None, None, torch.float32)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return product(gradient, weight), product(gradient.t(), x)


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight) + self.bias


def make(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    kind = Float8Linear if recipe == "own" else nn.Linear
    model = nn.Sequential(kind(WIDTH, 2 * WIDTH), nn.ReLU(), kind(2 * WIDTH, WIDTH))
    if recipe == "own":
        return model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss = model(x)
    loss = loss if loss.dim() == 0 else loss.square().mean()
    loss.backward()
    return [loss.detach(), *(whole(p.grad) for p in model.parameters())]


def squares(result: Tensor, target: Tensor) -> Tensor:
    return (result - target).square().mean()


def both(rank: int, world_size: int, recipe: str, strategy: Any) -> tuple[list[str], float]:
    """Kinds of products in the program, and the largest relative error of a gradient."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    zero = torch.zeros(ROWS, WIDTH)
    want = gradients(make(recipe), x)
    model = autopar.compile(
        make(recipe), strategy=strategy, example_inputs=(x, zero), loss_fn=squares, fallback=False
    )
    loss = model(x, zero)
    loss.backward()
    found = [loss.detach(), *(whole(p.grad) for p in model.parameters())]
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, want, strict=True)]
    (program,) = model._execution.executor.programs.values()
    kinds = [str(node.target) for node in program.graph.calls() if "mm" in str(node.target)]
    return kinds, max(errors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "bound"), [("own", 1e-5), ("tensorwise", 1e-5), ("rowwise", 2**-5)]
)
@pytest.mark.parametrize("strategy", [fixed(3), fixed(0, tp=2)], ids=["zero3", "tp2"])
def test_float8_is_exact(recipe: str, bound: float, strategy: Any) -> None:
    if recipe != "own":
        pytest.importorskip("torchao")
    for kinds, error in run(both, 2, recipe=recipe, strategy=strategy):
        assert "aten._scaled_mm.default" in kinds
        assert error < bound, error
