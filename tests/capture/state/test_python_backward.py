"""Hooks and Functions that run Python code in a backward: followed, or refused."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.errors import CaptureError, NumericsWarning, StrategyError
from tests.harness.training import Pair, fixed
from tests.harness.worlds import run

Between = Callable[[Any, int], None]
FACTOR = {"all": 1.0}
STEPS = [0]


class Reversal(torch.autograd.Function):
    """The gradient times a number that only the backward reads."""

    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Any) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -Reversal.strength * ctx.module.slope * gradient, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.slope, self.calls, self.gradients = 1.0, 0, list[Tensor]()

    def forward(self, x: Tensor) -> Any:
        return self.last(self.middle(self.first(x).tanh())).square().mean()

    def middle(self, h: Tensor) -> Tensor:
        return h


class Reversing(Model):
    def middle(self, h: Tensor) -> Tensor:
        return h + Reversal.apply(h, self)


class Hooking(Model):
    def middle(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient * self.slope * FACTOR["all"])
        return h


class HookingNodes(Model):
    def middle(self, h: Tensor) -> Tensor:
        h.grad_fn.register_prehook(lambda gradients: (gradients[0] * FACTOR["all"],))
        return h


class HookedModule(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_hook(lambda m, inner, outer: None)
        self.last.register_full_backward_pre_hook(lambda m, outer: (outer[0] * FACTOR["all"],))


def set_all(m: Any, step: int) -> None:
    Reversal.strength = FACTOR["all"] = m.slope = 1.0 + 0.5 * step


@pytest.mark.parametrize("make", [Reversing, Hooking, HookingNodes, HookedModule])
def test_what_a_backward_reads_is_followed(make: type[Model]) -> None:
    trained(make, before=set_all)


@pytest.mark.parametrize("make", [Reversing, Hooking, HookingNodes, HookedModule])
def test_a_change_after_the_call_is_refused(make: type[Model]) -> None:
    m = autopar.compile(make(), strategy=fixed(0), fallback=False)
    set_all(m, 0)
    m(torch.ones(2, 4)).backward()
    loss = m(torch.ones(2, 4))
    set_all(m, 0)  # to the same values
    loss.backward()
    loss = m(torch.ones(2, 4))
    set_all(m, 1)
    with pytest.raises(StrategyError, match="changed between a call of"):
        loss.backward()
    set_all(m, 0)


class Keeping(Model):
    def middle(self, h: Tensor) -> Tensor:
        h.register_hook(self.gradients.append)
        return h


class Counting(Model):
    def middle(self, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: setattr(self, "calls", self.calls + 1))
        return h


@pytest.mark.parametrize("make", [Keeping, Counting])
def test_changes_by_a_backward_are_refused(make: type[Model]) -> None:
    m = autopar.compile(make(), strategy=fixed(0), fallback=False)
    with pytest.raises(CaptureError, match=r"in its backward changes self\.(gradients|calls)"):
        m(torch.ones(2, 4))


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def swap_class(m: Any, step: int) -> None:
    m.last.__class__ = Doubled if step % 2 else nn.Linear


@functools.cache
def settings() -> list[int]:
    return STEPS


class Cached(Model):
    def middle(self, h: Tensor) -> Tensor:
        return h * (1 + settings()[0])


def set_steps(m: Any, step: int) -> None:
    STEPS[0] = step


@pytest.mark.parametrize(("make", "before"), [(Model, swap_class), (Cached, set_steps)])
def test_what_is_behind_forward_is_followed(make: type[Model], before: Between) -> None:
    settings()
    trained(make, before)


def test_a_hook_of_all_modules_is_followed() -> None:
    handles = []

    def add(m: Any, step: int) -> None:
        if step == 2 and not handles:
            handles.append(register_module_forward_hook(halve))

    trained(Model, add, lambda: [handle.remove() for handle in handles])


def halve(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output / 2 if isinstance(module, nn.Linear) else None


class Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result / 2 if func is Tensor.tanh else result


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_mode_around_the_call_is_told() -> None:
    m = autopar.compile(Model(), strategy=fixed(0), fallback=False)
    x = torch.linspace(-1, 1, 8).view(2, 4)
    m(x)
    with FlopCounterMode(display=False), torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("error")
        m(x)
    for mode in (Halving(), Watching()):
        with mode, pytest.warns(NumericsWarning, match=f"called under {type(mode).__name__}"):
            m(x)


class Returning(Model):
    """Its results have the number of calls."""

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x), {"calls": self.calls, "before": self.calls - 1}


def test_a_counter_in_the_result_counts() -> None:
    m = autopar.compile(Returning(), strategy=fixed(0), fallback=False)
    counts = [m(torch.ones(2, 4))[1] for _ in range(3)]
    assert counts == [{"calls": n + 1, "before": n} for n in range(3)]
    assert {type(n) for count in counts for n in count.values()} == {int}


def trained(
    make: type[Model], before: Between, after: Callable[[], Any] = lambda: None, **options: Any
) -> None:
    """Trains beside the plain model; `before` changes each of them before its call."""
    pair = Pair(make, strategy=fixed(**options))
    try:
        for step in range(4):
            for m in pair.models:
                before(m, step)
                m(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)).backward()
            pair.step()
        pair.check_state()
    finally:
        after()


def two_ranks(rank: int, world_size: int, options: dict[str, int]) -> None:
    for make in (Reversing, Hooking, HookedModule):
        trained(make, set_all, **options)
    model = autopar.compile(Model(), strategy=fixed(**options), fallback=False)
    first, second = model(torch.ones(4, 4)), model(torch.ones(4, 4))
    first.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    with pytest.raises((StrategyError, RuntimeError), match=r"in place|inplace"):
        second.backward()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            model(torch.ones(4, 4))
    hooks = [each for each in told if "hooks on saved tensors around a call" in str(each.message)]
    assert [each.category for each in hooks] == [NumericsWarning] * (rank == 0)
    held = Model()
    weight = held.first.weight
    autopar.compile(held, strategy=fixed(**options), fallback=False)
    assert weight.shape == (4, 4)
    if "zero" in options:  # stages keep the parameter itself
        with pytest.raises(StrategyError, match="taken from the model before"):
            weight.norm()


@pytest.mark.parametrize("options", [{}, {"zero": 3}, {"pp": 2}], ids=str)
def test_two_ranks(options: dict[str, int]) -> None:
    run(two_ranks, 2, options=options)
