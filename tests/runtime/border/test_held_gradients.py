"""Gradients that no_sync holds back are those of `.grad`: discarded with it, reduced by reads."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import DisagreementError, StrategyError
from autopar.runtime.parameters.distribute import is_remote
from tests.harness.worlds import run

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"zero": 0},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "hybrid": {"zero": 3, "dp_shard": 2},
    "tp": {"zero": 3, "tp": 2},
    "pp": {"pp": 2, "micro_batches": 2},
}


class Regression(nn.Module):
    """Reads a value in forward, which no capture can, if it is to run under the fallback."""

    def __init__(self, is_captured: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
        self.is_captured = is_captured

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.layers(x)
        scale = 1.0 if self.is_captured else 1.0 + 0.0 * out.detach().sum().item()
        return F.mse_loss(out, y) * scale


def batch(seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
    return x * scale, y


def compiled(model: nn.Module, strategy: str, world_size: int) -> Any:
    if strategy == "fallback":
        return autopar.compile(model, strategy="auto")
    fixed = autopar.Strategy(recompute="none", **STRATEGIES[strategy])
    return autopar.compile(
        model, strategy=fixed, cluster=autopar.Cluster.default(world_size, "cpu")
    )


def assign_none(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def zero_data(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        if not is_remote(parameter) and parameter.grad is not None:
            parameter.grad.data.zero_()


DISCARDS: list[Callable[[Any, Any], None]] = [
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: model.zero_grad(),
    assign_none,
    zero_data,
]


def train(model: Any, is_compiled: bool) -> None:
    """Windows that are given up after a batch of NaN, before or beside other losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    nothing = model.no_sync if is_compiled else torch.enable_grad
    for step, discard in enumerate(DISCARDS):
        model(*batch(step)).backward()  # a reduced gradient, to be discarded as well
        with nothing():
            model(*batch(step, torch.nan)).backward()
            model(*batch(step)).backward()
        if step % 2:
            loss = model(*batch(step))
            discard(model, optimizer)
            loss.backward()
        else:
            discard(model, optimizer)
            with nothing():
                model(*batch(10 + step)).backward()
            model(*batch(20 + step)).backward()
        optimizer.step()
        discard(model, optimizer)


def train_both(train: Callable[[Any, bool], None], strategy: str, world_size: int) -> Any:
    """The compiled model, after it has trained as the plain one has."""
    torch.manual_seed(0)
    plain = Regression(strategy != "fallback").double()
    parallel = compiled(copy.deepcopy(plain), strategy, world_size)
    train(plain, False)
    train(parallel, True)
    state = parallel.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-9, msg=strategy)
    return parallel


def give_up(strategies: tuple[str, ...], rank: int, world_size: int) -> None:
    for strategy in strategies:
        train_both(train, strategy, world_size)


def test_zero_grad_discards_them() -> None:
    run(partial(give_up, ("ddp", "zero3", "fallback")), 2)


@pytest.mark.slow
def test_zero_grad_discards_them_in_pipelines() -> None:
    run(partial(give_up, ("pp",)), 4)


def leave_over(model: Any, is_compiled: bool) -> None:
    """Windows that an epoch's end cuts short; gradients are clipped, or stepped by as they are."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, eps=1e-3)
    hold = model.no_sync if is_compiled else torch.enable_grad
    for step in range(4):
        if step == 2:
            model(*batch(step)).backward()  # is reduced already
        with hold():
            for seed in range(step % 2 + 1):
                model(*batch(10 * step + seed)).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step < 2)


def left_over(strategies: tuple[str, ...], rank: int, world_size: int) -> None:
    for strategy in strategies:
        train_both(leave_over, strategy, world_size)


def test_steps_by_them_reduce_them() -> None:
    run(partial(left_over, ("ddp", "zero3")), 2)


@pytest.mark.slow
def test_steps_by_them_reduce_them_on_several_axes() -> None:
    run(partial(left_over, ("zero2", "hybrid", "tp")), 4)


def other_steps(rank: int, world_size: int) -> None:
    model = compiled(Regression().double(), "ddp", world_size)
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        model(*batch(0)).backward()
    with pytest.raises(DisagreementError):
        optimizer.step() if rank else model(*batch(0))


def test_a_step_by_them_on_some_ranks_is_an_error() -> None:
    run(other_steps, 2)


def refused(rank: int, world_size: int) -> None:
    model = compiled(Regression(False).double(), "fallback", world_size)
    optimizer = torch.optim.AdamW(model.parameters())
    with model.no_sync():
        model(*batch(0)).backward()
    with pytest.raises(StrategyError, match=r"outside of no_sync\(\)"):
        optimizer.step()
    with pytest.raises(StrategyError, match=r"outside of no_sync\(\)"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert not optimizer.state
    model(*batch(0)).backward()
    optimizer.step()


def test_steps_by_them_are_refused_by_the_fallback() -> None:
    run(refused, 2)


def add_beside(rank: int, world_size: int) -> None:
    """A penalty in the loop adds to a gradient whose part of the model is held back."""
    torch.manual_seed(0)
    plain = Regression().double()
    parallel = compiled(copy.deepcopy(plain), "ddp", world_size)
    for model, hold in ((plain, torch.enable_grad), (parallel, parallel.no_sync)):
        for seed in range(3):
            penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
            with hold() if seed < 2 else torch.enable_grad():
                loss = model(*batch(seed))
            (loss + penalty).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, parameter in parallel.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_penalties_beside_them() -> None:
    run(add_beside, 2)


def change_in_place(rank: int, world_size: int) -> None:
    """In-place changes of a gradient that is held back, each with its own arguments."""
    torch.manual_seed(0)
    plain = Regression().double()
    parallel = compiled(copy.deepcopy(plain), "ddp", world_size)
    changes: list[Callable[[Tensor], Any]] = [
        lambda g: g.add_(torch.ones_like(g), alpha=0.1),
        lambda g: g.add_(1.0),
        lambda g: g.sub_(torch.ones_like(g)),
        lambda g: g.addcmul_(g.clone(), g.clone(), value=2),
        lambda g: torch.add(g, 1.0, out=g),
        lambda g: torch._foreach_add_([g], [torch.ones_like(g)], alpha=3),
    ]
    for change in changes:
        for model, hold in ((plain, contextlib.nullcontext), (parallel, parallel.no_sync)):
            with hold():
                model(*batch(0)).backward()
            for parameter in model.parameters():
                change(parameter.grad)
        for one, other in zip(plain.parameters(), parallel.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad)
        for model in (plain, parallel):
            model.zero_grad()
    older = []
    for model in (plain, parallel):
        model(*batch(0)).backward()
        older.append([p.grad for p in model.parameters()])
    with parallel.no_sync():
        parallel(*batch(1)).backward()
    plain(*batch(1)).backward()
    [p.grad.sum() for p in parallel.parameters()]
    for one, other in zip(*older, strict=True):  # still the gradients, as on one device
        torch.testing.assert_close(other, one)


def test_changes_of_them_in_place() -> None:
    run(change_in_place, 2)


def use_kept(model: Any, is_compiled: bool) -> None:
    """Gradients that a loop keeps are read and changed while parts of them are held back."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    changes: list[Callable[[Tensor], Any]] = [
        lambda g: g.mul_(0.5),
        lambda g: g.masked_fill_(g > 0, 0.0),
        lambda g: g.div_(g.norm()),
        lambda g: g.zero_(),
        lambda g: None,
    ]
    for step, change in enumerate(changes):
        model(*batch(step)).backward()
        kept = [p.grad for p in model.parameters()]
        with model.no_sync() if is_compiled else contextlib.nullcontext():
            model(*batch(10 + step)).backward()
            for gradient in kept:
                change(gradient)
            model(*batch(20 + step)).backward()
        model(*batch(30 + step)).backward()
        assert all(p.grad is g for p, g in zip(model.parameters(), kept, strict=True))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def use_kept_gradients(rank: int, world_size: int) -> None:
    for strategy in ("ddp", "zero2", "zero3"):
        train_both(use_kept, strategy, world_size)


def test_gradients_that_a_loop_keeps() -> None:
    run(use_kept_gradients, 2)


def train_by_closures(model: Any, is_compiled: bool) -> None:
    """The last micro-batch of each window runs inside of the optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    nothing = model.no_sync if is_compiled else torch.enable_grad

    def last(step: int) -> Tensor:
        loss: Tensor = model(*batch(20 + step))
        loss.backward()
        return loss

    for step in range(3):
        with nothing():
            model(*batch(step)).backward()
        optimizer.step(partial(last, step))
        optimizer.zero_grad()


def held_back_to_the_step(model: Any, is_compiled: bool) -> None:
    with model.no_sync() if is_compiled else torch.enable_grad():
        train_by_closures(model, False)


def step_by_closures(rank: int, world_size: int) -> None:
    for strategy in ("ddp", "zero3"):
        train_both(train_by_closures, strategy, world_size)
        train_both(held_back_to_the_step, strategy, world_size)
    parallel = train_both(train_by_closures, "fallback", world_size)
    with pytest.raises(StrategyError, match="each rank holds back its own part"):
        held_back_to_the_step(parallel, True)


def test_closures_reduce_them() -> None:
    run(step_by_closures, 2)
