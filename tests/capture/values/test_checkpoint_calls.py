"""Functions of `torch.utils.checkpoint`: captured in either variant, as the plain model trains."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.core.ir.roles import Gradient
from autopar.errors import NumericsWarning
from tests.capture.test_trace import Forward, Model, W, X, captured, run


def reentrant(function: Any, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, x, use_reentrant=True)
    return result


def check_gradient(model: Model) -> None:
    graph = captured(model).graph
    model(X).backward()
    assert model.lin.weight.grad is not None
    assert torch.allclose(run(model, graph, X)[Gradient(W)], model.lin.weight.grad)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: reentrant(m.lin, reentrant(m.lin, m.lin(x))).mean(),
        lambda m, x: reentrant(lambda y: reentrant(m.lin, y).tanh(), m.lin(x)).mean(),
    ],
    ids=["in a row", "nested"],
)
def test_reentrant_checkpoints(forward: Forward) -> None:
    check_gradient(Model(forward))


def test_a_reentrant_checkpoint_trains_nothing_where_no_argument_does() -> None:
    with pytest.warns(UserWarning, match="None of the inputs"):
        check_gradient(Model(lambda m, x: m.lin(x).mean() + reentrant(m.lin, x).mean()))


def test_statistics_inside_of_a_checkpoint_are_told() -> None:
    model = Model(lambda m, x: checkpoint(m.norm, m.lin(x), use_reentrant=False).mean())
    model.norm = nn.BatchNorm1d(4)
    with pytest.warns(NumericsWarning, match=r"norm.num_batches_tracked \(and 2 more\)"):
        captured(model)
