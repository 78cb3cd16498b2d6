"""Gradient hooks of a loop see what they see on one device, and only then."""

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.core.common.notices import ISSUED
from autopar.runtime.agreement.consensus import gather_objects
from tests.harness.training import ADAMW, close, fixed, whole_state
from tests.harness.worlds import run
from tests.runtime.border.test_untouched import TwoHeads, batch

STRATEGIES = (fixed(0), fixed(3), fixed(0, tp=2), fixed(0, pp=2, micro_batches=2))


def hook_all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / (1 + gradient.norm()))


def one_after_the_other(model: Any) -> None:
    """Each loss reaches one head alone; the input is a result of the loop, with a hook too."""
    hook_all(model)
    optimizer, scale = ADAMW(model.parameters()), torch.ones(6, dtype=torch.float64)
    for step in range(2):
        x, y, t = batch(step)
        scaled = x * scale.requires_grad_()
        scaled.register_hook(lambda gradient: gradient * 2)
        first, second = model(scaled, y, t)
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulated(model: Any) -> None:
    """A hook that is not linear sees each micro-batch by itself, also inside of no_sync()."""
    hook_all(model)
    optimizer = ADAMW(model.parameters())
    for step in range(2):
        with getattr(model, "no_sync", contextlib.nullcontext)():
            sum(model(*batch(2 * step))).backward()
        sum(model(*batch(2 * step + 1))).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.filterwarnings("ignore:parameters have gradient hooks")
def beside_one_device(rank: int, world_size: int, loop: Any) -> None:
    plain = TwoHeads()
    loop(plain)
    for strategy in STRATEGIES if world_size > 1 else STRATEGIES[:1]:
        model = autopar.compile(TwoHeads(), strategy=strategy, fallback=False)
        loop(model)
        close(whole_state(model), plain.state_dict())


def draw_in_hooks(rank: int, world_size: int, strategy: autopar.Strategy) -> None:
    """The order of hooks is not that of one device, which is told where it matters."""
    model = autopar.compile(TwoHeads(), strategy=strategy, fallback=False)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g + 0.1 * torch.rand(g.shape, dtype=g.dtype))
    ISSUED.clear()
    warns = pytest.warns(autopar.NumericsWarning, match="draw random numbers")
    with warns if rank == 0 else contextlib.nullcontext():
        sum(model(*batch(0))).backward()
    states = gather_objects(torch.get_rng_state().tolist())
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_hooks_that_draw_are_told(strategy: autopar.Strategy) -> None:
    run(partial(draw_in_hooks, strategy=strategy), 2)


def test_hooks_of_losses_in_turn() -> None:
    run(beside_one_device, 1, loop=one_after_the_other)


@pytest.mark.slow
def test_hooks_of_losses_in_turn_on_two_ranks() -> None:
    run(beside_one_device, 2, loop=one_after_the_other)


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_of_micro_batches(ranks: int) -> None:
    run(beside_one_device, ranks, loop=accumulated)
