"""Streams of random numbers: a GPU's own generator; the user's draws stay those of one device."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.runtime import rng
from autopar.runtime.options import Options
from autopar.runtime.rng import RandomStream
from tests.harness.worlds import run

GPU = torch.device("cuda", 1)


class Generators:
    """CUDA's default generators, played by generators of the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.default = 0, [torch.Generator() for _ in range(2)]
        make = torch.Generator
        monkeypatch.setattr(rng.torch, "Generator", lambda device: make())
        monkeypatch.setattr(torch.cuda, "device", self.using)
        monkeypatch.setattr(torch.cuda, "initial_seed", lambda: self.own().initial_seed())
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda d: self.own(d).get_state())
        monkeypatch.setattr(torch.cuda, "set_rng_state", lambda s, d: self.own(d).set_state(s))

    def own(self, device: torch.device | None = None) -> torch.Generator:
        return self.default[self.current if device is None else device.index]

    @contextlib.contextmanager
    def using(self, device: torch.device) -> Any:
        before, self.current = self.current, device.index
        yield
        self.current = before


def drawn(generators: Generators, seed: int) -> Tensor:
    """Numbers of a rank's stream after both generators were seeded."""
    generators.own(GPU).manual_seed(seed)
    outer, on_cpu = generators.own(GPU).get_state(), torch.get_rng_state()
    with RandomStream(Options(ranks=2), GPU).as_default(needed=True):
        found = torch.rand(4, generator=generators.own(GPU))
    assert generators.own(GPU).get_state().equal(outer), "the caller's generator has moved"
    assert torch.get_rng_state().equal(on_cpu), "the CPU's generator has moved"
    return found


def test_a_gpu_draws_from_its_generator_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Generators(monkeypatch)
    torch.manual_seed(0)
    first = drawn(generators, 1)
    torch.manual_seed(5)  # of the CPU
    generators.default[0].manual_seed(5)  # of another GPU
    assert drawn(generators, 1).equal(first)
    assert not drawn(generators, 2).equal(first)


def draws_around_planning(rank: int, world_size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2))
    x, before = torch.randn(4, 4), torch.get_rng_state()
    if options.pop("ahead"):
        options["example_inputs"] = (x,)
    model = autopar.compile(layers, **options)
    model(x).sum().backward()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"ahead": False, "strategy": "zero3"},
        {"ahead": True, "strategy": "zero3"},
        {"ahead": True, "trials": 0},  # measures and searches
    ],
    ids=["zero3, late", "zero3", "auto"],
)
def test_planning_leaves_the_default_generator(options: dict[str, Any]) -> None:
    """A loop that draws its batches from it draws those of one device."""
    run(draws_around_planning, 2, options=options)


class LossAndRows(nn.Module):
    """A loss beside rows with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = nn.functional.dropout(self.layer(x), 0.5)
        return rows.square().mean(), rows


class Drawn(nn.Module):
    """A draw whose gradient does not depend on the incoming one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.normal(x, self.scale)


@pytest.mark.parametrize("name", ["rows", "draw"])
def test_a_backward_keeps_the_draws_of_its_forward(name: str) -> None:
    """The first gradient of rows beside a loss has the forward run again, in another graph."""
    results = []
    for compiles in (False, True):
        torch.manual_seed(2)
        model: Any = LossAndRows() if name == "rows" else Drawn()
        if compiles:
            strategy = autopar.Strategy(zero=0, recompute="none")
            model = autopar.compile(model, strategy=strategy, fallback=False)
        x = torch.ones(2, 4 if name == "rows" else 3, dtype=torch.float64)
        torch.manual_seed(3)
        losses = []
        for _ in range(3):
            output = model(x)
            output = output[1] if name == "rows" else output
            output.square().sum().backward()
            losses.append(output.detach())
        gradients = [parameter.grad for parameter in model.parameters()]
        results.append([*losses, *gradients])
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=0)
