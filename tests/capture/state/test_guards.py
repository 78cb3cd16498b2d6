"""Changes of Python state, by forward or between calls: followed, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import autopar
from tests.capture.state.stateful_models import (
    CARRIED,
    CHANGES,
    REPLAYED,
    SEEN,
    Between,
    Blocks,
    Layer,
    add_a_hook,
    alike,
    hook_a_parameter,
    model,
    queues,
    reads_everything,
    rebinds_a_buffer,
    rebinds_an_attribute,
    set_config,
    set_k,
    set_scales,
    sets_a_flag,
)
from tests.harness.reference import relative_error
from tests.harness.training import fixed
from tests.harness.worlds import run


@pytest.mark.parametrize("step", CARRIED + REPLAYED, ids=lambda f: f.__name__)
def test_forward_may_change(step: Any) -> None:
    plain, m = alike(model(step))
    assert (m.k, m.ready, m.cache.keys()) == (plain.k, plain.ready, plain.cache.keys())


def test_repeated_blocks_may_rebind_buffers() -> None:
    alike(Blocks)


@pytest.mark.parametrize("between", CHANGES, ids=lambda f: f.__name__)
def test_changes_between_calls_take_effect(between: Between) -> None:
    alike(model(reads_everything), between)


def test_every_repeated_block_is_guarded() -> None:
    alike(lambda: Blocks(2.0), set_scales)


def reads_a_counter(self: Any, h: Tensor) -> Any:
    self.k += 1
    return self.k


def reads_a_count_in_python(self: Any, h: Tensor) -> Any:
    self.k += 1
    return 2.0 if self.k > 2 else 1.0


def appends(self: Any, h: Tensor) -> Any:
    self.ks.append(3)
    return 1.0


def grows(self: Any, h: Tensor) -> Any:
    self.queue = torch.cat([self.queue, h.detach().mean(0)[None]])
    return 1.0


def leaks(self: Any, h: Tensor) -> Any:
    SEEN.append(h.detach())
    return 1.0


def makes_a_buffer(self: Any, h: Tensor) -> Any:
    self.register_buffer("late", h.detach().mean(0))
    return 1.0


def changes_a_type(self: Any, h: Tensor) -> Any:
    self.ema = self.ema.float()
    return 1.0


REFUSED = {
    reads_a_counter: r"self\.k at test_guards.py:\d+: self.k \+= 1: .* is \d+ after",
    reads_a_count_in_python: r"self\.k at test_guards.py:\d+: .* afterwards",
    appends: r"self\.ks\[2\] at test_guards.py:\d+: self.ks.append\(3\): the contents of a list",
    grows: r"self\.queue at .*: forward reads it, and a float64 tensor of shape \[7, 4\]",
    leaks: r"SEEN\[0\]: it is a variable outside of the model",
    makes_a_buffer: r"self\.late.*a buffer that was nothing becomes a float64 tensor",
    changes_a_type: r"buffer ema: it was a float64 tensor .* becomes a float32 tensor",
}


@pytest.mark.parametrize("step", REFUSED, ids=lambda f: f.__name__)
def test_changes_that_cannot_be_replayed_are_refused(step: Any) -> None:
    m = autopar.compile(model(step)().double(), strategy=fixed(0), fallback=False)
    with pytest.raises(autopar.CaptureError, match=REFUSED[step]):
        m(torch.ones(6, 4).double())
    plain = model(step)().double()
    assert (m.k, m.ks, SEEN, list(m.state_dict())) == (1, [1, 2], [], list(plain.state_dict()))
    assert torch.equal(m.queue, plain.queue)


def reparametrize(m: Any) -> None:
    nn.utils.parametrizations.weight_norm(m.layer)


def to_float(m: Any) -> None:
    m.layer.float()


def replace_by_wider(m: Any) -> None:
    m.layer = nn.Linear(4, 8)


@pytest.mark.parametrize("change", [reparametrize, to_float, replace_by_wider])
def test_parameters_that_the_plan_does_not_know_are_refused(change: Callable[[Any], None]) -> None:
    m = autopar.compile(Layer().double(), strategy=fixed(0))
    m(torch.ones(6, 4).double())
    change(m)
    with pytest.raises(autopar.PlanError, match=r"parameter layer\.weight of Layer was float64"):
        m(torch.ones(6, 4).double())


def test_a_state_that_changes_at_every_step_is_told() -> None:
    m = autopar.compile(model(reads_everything)().double(), strategy=fixed(0))
    for step in range(7):
        m.k = step
        m(torch.ones(6, 4).double())
    m.k = 7
    with pytest.warns(UserWarning, match=r"self\.k of Reads.* changed: it is the 8th"):
        m(torch.ones(6, 4).double())


class Checkpointed(nn.Module):
    """A model whose activations may be computed again, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.gradient_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.gradient_checkpointing and self.training:
                x = checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.square().mean()


def enable(m: Any, step: int) -> None:
    m.gradient_checkpointing = step == 2


def test_gradient_checkpointing_is_told_to_have_no_effect() -> None:
    with pytest.warns(UserWarning, match=r"Checkpointed calls torch.utils.checkpoint.*recompute="):
        alike(Checkpointed, enable)


def test_a_copy_has_state_of_its_own() -> None:
    m = autopar.compile(model(rebinds_an_attribute)().double(), strategy=fixed(0))
    x = torch.ones(6, 4).double()
    m(x)
    other = copy.deepcopy(m)
    programs = len(m._execution.executor.programs)
    first, second = other(x), m(x)
    assert torch.equal(first, second)
    assert len(m._execution.executor.programs) == programs
    other.last = torch.zeros(4).double()
    assert not torch.equal(other(x), m(x))
    assert torch.equal(m.last, other.last)


def test_evaluation_sees_what_training_left() -> None:
    def reads_in_evaluation(self: Any, h: Tensor) -> Any:
        scale = 1 + self.last
        if self.training:
            self.last = h.detach().mean(0)
        return scale

    def evaluate(m: Any, step: int) -> None:
        m.eval()
        with torch.no_grad():
            m.seen.append(m(torch.ones(6, 4).double()).item())
        m.train()

    def make() -> nn.Module:
        made = model(reads_in_evaluation)()
        made.seen = []
        return made

    plain, m = alike(make, evaluate)
    assert m.seen == pytest.approx(plain.seen, rel=1e-12)


class Scaled(nn.Module):
    """A loss with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        return (h - target).square().mean() * self.scale


def test_constants_and_loss_functions_are_guarded() -> None:
    def reads_constants(self: Any, h: Tensor) -> Any:
        return 1 + self.last + self.queue[0]

    def change(m: Any, step: int) -> None:
        m.last = torch.full((4,), float(step)).double()
        m.queue.fill_(step)

    alike(model(reads_constants), change)
    loss_fn = Scaled()
    m = autopar.compile(nn.Linear(4, 4), strategy=fixed(0), loss_fn=loss_fn)
    x = torch.ones(2, 4)
    first = m(x, x)
    loss_fn.scale = 3.0
    assert m(x, x).item() == pytest.approx(3 * first.item())


def test_a_backward_after_a_change_is_the_old_one() -> None:
    plain = model(reads_everything)().double()
    m = autopar.compile(model(reads_everything)().double(), strategy=fixed(0))
    for each in (plain, m):
        loss = each(torch.ones(6, 4).double())
        each.k = 5
        loss.backward()
    assert relative_error(m.layer.weight.grad, plain.layer.weight.grad) < 1e-12


def several(rank: int, world_size: int, zero: int) -> None:
    alike(model(rebinds_a_buffer), set_k, zero)
    alike(model(queues), None, zero)
    alike(model(reads_everything), set_config, zero)
    alike(model(reads_everything), add_a_hook, zero)
    alike(model(sets_a_flag), hook_a_parameter, zero)
    alike(hooked, None, zero)


def hooked() -> nn.Module:
    """A model with a hook on a parameter from the start."""
    made = Layer().double()
    made.layer.weight.register_hook(lambda gradient: gradient * 2)
    return made


def keep_rows(rank: int, world_size: int) -> None:
    def keeps_rows(self: Any, h: Tensor) -> Any:
        self.aux = h
        return 1.0

    m = autopar.compile(model(keeps_rows)().double(), strategy=fixed(0))
    m(torch.ones(6, 4).double())
    assert m.aux.shape == (6, 4)


@pytest.mark.slow
def test_attributes_get_the_rows_of_all_ranks() -> None:
    run(keep_rows, 2)


@pytest.mark.parametrize("zero", [0, 3])
def test_two_ranks(zero: int) -> None:
    run(several, 2, zero=zero)
