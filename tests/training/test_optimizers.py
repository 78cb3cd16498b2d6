"""Optimizers of torch and others, each under several plans: exact, or an error; never otherwise.

docs/works-with.md has the same table.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autopar
from benchmarks.memoize import memoized_capture
from tests.harness.reference import relative_error
from tests.harness.training import close, fixed
from tests.harness.worlds import run

po = pytest.importorskip("pytorch_optimizer")

f64 = torch.float64
STEPS = 3
CAPTURES: dict[Any, Any] = {}

Named = list[tuple[str, nn.Parameter]]
Make = Callable[[Named], Any]


def of(kind: Any, matrices: bool = False, **options: Any) -> Make:
    """Makes an optimizer of all parameters, or of matrices alone."""

    def make(named: Named) -> Any:
        return kind([p for _, p in named if p.dim() == 2 or not matrices], **options)

    return make


APART: dict[str, Make] = {
    "SGD": of(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "AdamW": of(optim.AdamW, lr=1e-2),
    "AdamW, fused": of(optim.AdamW, lr=1e-2, fused=True),
    "RMSprop": of(optim.RMSprop, lr=1e-3),
    "Adagrad": of(optim.Adagrad, lr=1e-2),
    "Adadelta": of(optim.Adadelta),
    "Adamax": of(optim.Adamax, lr=1e-2),
    "NAdam": of(optim.NAdam, lr=1e-2),
    "RAdam": of(optim.RAdam, lr=1e-2),
    "ASGD": of(optim.ASGD, lr=1e-2),
    "Lion": of(po.Lion, lr=1e-3),
    "ScheduleFreeAdamW": of(po.ScheduleFreeAdamW, lr=1e-2),
    "Muon": of(optim.Muon, matrices=True, lr=1e-2),
}
"""Exact on shards."""


def make_mixed(named: Named) -> Any:
    """Two groups, of which one has no state."""
    split = {dim: [p for _, p in named if p.dim() == dim] for dim in (1, 2)}
    return optim.SGD([{"params": split[1]}, {"params": split[2], "momentum": 0.9}], lr=0.05)


APART["SGD, momentum for matrices"] = make_mixed

WHOLE: dict[str, Make] = {
    "Adafactor": of(optim.Adafactor, lr=1e-2),
    "Rprop": of(optim.Rprop, lr=1e-3),
    "LAMB": of(po.Lamb, lr=1e-2),
    "LARS": of(po.LARS, lr=1e-2),
    "Shampoo": of(po.Shampoo, lr=1e-2),
    "CAME": of(po.CAME, lr=1e-3),
}
"""Read whole tensors: an error on shards, exact by `whole_optimizer`."""

COUPLED: dict[str, Make] = {
    "LBFGS": of(optim.LBFGS, lr=0.1, max_iter=3),
    "Prodigy": of(po.Prodigy),
}
"""Step all parameters together: an error on stages too, exact by `whole_optimizer`."""


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.GELU())
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.head(self.norm(self.layers(x))) - y).square().mean()


def make_regressor() -> Regressor:
    torch.manual_seed(2)
    return Regressor().double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (12, 6), (12, 3)
    x, y = (torch.randn(shape, generator=generator, dtype=f64) for shape in shapes)
    return x, y


def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Losses of some steps."""
    losses = []
    for seed in range(STEPS):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(*batch(seed))
            loss.backward()
            return loss

        if isinstance(optimizer, optim.LBFGS):
            losses.append(optimizer.step(closure))
        else:
            losses.append(closure())
            optimizer.step()
    return [loss.detach() for loss in losses]


def compiled(strategy: Any) -> Any:
    with memoized_capture(CAPTURES):
        return autopar.compile(make_regressor(), strategy=strategy, example_inputs=batch(0))


def newton_schulz(gradient: Tensor, *rest: Any) -> Tensor:
    """Muon's iteration without its bfloat16, whose rounding depends on the order of sums."""
    a, b, c = rest[0]
    x = gradient.T if gradient.size(0) > gradient.size(1) else gradient
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(rest[1]):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if gradient.size(0) > gradient.size(1) else x


def compare(rank: int, world_size: int, name: str, strategy: Any) -> None:
    """Every optimizer under one strategy, beside the plain model's."""
    optim._muon._zeropower_via_newtonschulz = newton_schulz  # type: ignore[attr-defined]
    model = compiled(strategy)
    for kind, make in {**APART, **WHOLE, **COUPLED}.items():
        plain = make_regressor()
        want = train(plain, make([*plain.named_parameters()])), plain.state_dict()
        fails = name == "pp" and kind in COUPLED
        if fails:
            failing = compiled(strategy)
            with pytest.raises((RuntimeError, LookupError, autopar.AutoparError)):
                train(failing, make([*failing.named_parameters()]))
        else:
            restore(model)
            check(train(model, make([*model.named_parameters()])), model, want, kind)
        if name != "ddp" and kind not in APART:
            restore(model)
            check(train(model, model.whole_optimizer(make)), model, want, f"whole {kind}")


def restore(model: Any) -> None:
    model.load_full_state_dict(make_regressor().state_dict())
    model.zero_grad()


def check(losses: list[Tensor], model: Any, want: Any, kind: str) -> None:
    have = {**dict(enumerate(losses)), **model.full_state_dict()}
    wanted = {**dict(enumerate(want[0])), **want[1]}
    errors = {name: relative_error(have[name], wanted[name]) for name in wanted}
    assert max(errors.values()) <= 1e-9, f"{kind} differs: {errors}"


STRATEGIES = {
    "ddp": fixed(0),
    "zero3": fixed(3),
    "tp": fixed(0, tp=2),
    "pp": fixed(0, pp=2, micro_batches=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_optimizers_step_as_on_one_device(name: str) -> None:
    run(compare, 2, name=name, strategy=STRATEGIES[name])


def restart(rank: int, world_size: int) -> None:
    """The state of an optimizer of whole parameters is saved and loaded."""
    plain = make_regressor()
    optimizer = WHOLE["LAMB"]([*plain.named_parameters()])
    train(plain, optimizer)
    train(plain, optimizer)
    model = compiled(STRATEGIES["zero3"])
    optimizer = model.whole_optimizer(WHOLE["LAMB"])
    train(model, optimizer)
    saved = model.full_state_dict(), model.full_optimizer_state_dict(optimizer)
    model = compiled(STRATEGIES["pp"])
    optimizer = model.whole_optimizer(WHOLE["LAMB"])
    model.load_full_state_dict(saved[0])
    model.load_full_optimizer_state_dict(optimizer, saved[1])
    train(model, optimizer)
    close(model.full_state_dict(), plain.state_dict())


def test_whole_optimizers_restart_under_another_plan() -> None:
    run(restart, 2)
