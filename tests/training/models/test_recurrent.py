"""Recurrent layers under data parallelism train as on one device."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import EXACT, Pair, close, fixed
from tests.harness.worlds import run

STEPS, ROWS, SEQ, WIDTH = 3, 5, 3, 4


class Recurrent(nn.Module):
    """A recurrent network of two layers, and a loss of all that it returns."""

    def __init__(self, kind: str, batch_first: bool, bidirectional: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = getattr(nn, kind)
        self.layer = layer(WIDTH, 6, 2, batch_first=batch_first, bidirectional=bidirectional)
        self.head = nn.Linear(12 if bidirectional else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        states = last if isinstance(last, tuple) else (last,)
        loss = self.head(y).square().mean()
        return loss + sum(state.square().sum(-1).mean() for state in states)


def train(rank: int, world_size: int, dtype: torch.dtype, **layout: Any) -> tuple[str, ...]:
    """Trains beside the plain model; the notes of the plan."""
    pair = Pair(functools.partial(Recurrent, **layout), zero=0, dtype=dtype)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, SEQ, WIDTH, dtype=dtype, generator=generator)
        want, have = pair.plain(x), pair.parallel(x)
        close(have, want, EXACT[dtype])
        want.backward()
        have.backward()
        pair.check_gradients(EXACT[dtype])
        pair.step()
    pair.check_state(EXACT[dtype])
    return tuple(pair.parallel.plan.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype", "batch_first", "bidirectional"),
    [
        ("LSTM", torch.float64, True, True),
        ("LSTM", torch.float64, False, False),
        ("LSTM", torch.float32, True, False),
        ("LSTM", torch.float32, False, True),
        ("GRU", torch.float64, False, True),
        ("GRU", torch.float32, True, False),
        ("RNN", torch.float64, True, True),
        ("RNN", torch.float32, False, False),
    ],
)
def test_they_train_exactly(
    kind: str, dtype: torch.dtype, batch_first: bool, bidirectional: bool
) -> None:
    layout = {"kind": kind, "batch_first": batch_first, "bidirectional": bidirectional}
    assert run(train, 2, dtype=dtype, **layout) == [(), ()]


class Stages(nn.Module):
    """A recurrent network between linear layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = getattr(nn, kind)(WIDTH, WIDTH, batch_first=True)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.first(x))[0]
        for block in self.blocks:
            y = block(y).relu()
        return y.square().mean()


def train_divided(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> None:
    """Plans before an optimizer is made, and after."""
    x = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64)
    for given in ({}, {"example_inputs": (x,)}):
        pair = Pair(functools.partial(Stages, kind), strategy=fixed(**options), **given)
        for step in range(STEPS):
            torch.manual_seed(step)
            x = torch.randn(ROWS, SEQ, WIDTH, dtype=torch.float64)
            want, have = pair.plain(x), pair.parallel(x)
            close(have, want)
            want.backward()
            have.backward()
            pair.step()
        pair.check_state()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("options", [{"zero": 3}, {"zero": 0, "pp": 2}])
def test_layers_that_refer_weakly_to_their_weights_are_divided(
    kind: str, options: dict[str, Any]
) -> None:
    run(train_divided, 2, kind=kind, options=options)


def test_the_operators_of_an_lstm_are_measured(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    model = autopar.compile(Recurrent("LSTM", True, False), example_inputs=torch.randn(4, SEQ, 4))
    assert model.plan is not None
    assert model.plan.prediction.step_s > 0
    model(torch.randn(4, SEQ, WIDTH)).backward()
    weight = model.get_parameter("layer.weight_ih_l0")
    assert weight.grad is not None


def test_one_device_still_uses_its_own_kernels() -> None:
    """Tracing a model leaves oneDNN on for everything else."""
    model = autopar.compile(Recurrent("LSTM", True, False), strategy=fixed(0))
    model(torch.randn(4, SEQ, WIDTH))
    assert torch._C._get_mkldnn_enabled()
