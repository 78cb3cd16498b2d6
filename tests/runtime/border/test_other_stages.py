"""Under pipelines a loop may change parameters of all stages; reads of other stages are refused."""

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import autopar
from autopar.errors import StrategyError
from tests.harness.training import fixed, whole_state
from tests.harness.worlds import run


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.b(self.a(x).tanh()) - y).square().mean()


X, Y = (torch.randn(8, 6, generator=torch.Generator().manual_seed(i)) for i in (0, 1))


class Sam(torch.optim.SGD):
    """Sharpness-aware minimisation, as an optimizer of one device."""

    def norm(self) -> Tensor:
        return torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()


# -- what is refused ---------------------------------------------------------------------------


def clip_groups(optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)


READS: dict[str, Callable[[Any, Any], Any]] = {
    "torch's clipping": lambda m, o: nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "torch's clipping of an optimizer's": lambda m, o: clip_groups(o),
    "norm of gradients": lambda m, o: sum(p.grad.norm().item() for p in m.parameters()),
    "penalty": lambda m, o: m(X, Y) + sum(p.square().sum() for p in m.parameters()),
    "vector": lambda m, o: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(m.parameters()), m.parameters()
    ),
    "argument": lambda m, o: [m(X * x.weight.detach().mean(), Y) for x in (m.a, m.b)],
}


def refuse(rank: int, world_size: int, name: str, zero: int) -> None:
    model = autopar.compile(Regression(), strategy=fixed(zero, pp=2), example_inputs=(X, Y))
    optimizer = torch.optim.AdamW(model.parameters())
    model(X, Y).backward()
    with pytest.raises((StrategyError, autopar.DisagreementError)) as caught:
        READS[name](model, optimizer)
    assert "clip_grad_norm_()" in str(caught.value)
    assert "model.gathered()" in str(caught.value)


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("name", READS)
def test_reads_are_refused(name: str, zero: int) -> None:
    run(partial(refuse, name=name, zero=zero), 2)


def warn(rank: int, world_size: int) -> None:
    model = autopar.compile(Regression(), strategy=fixed(0, pp=2), example_inputs=(X, Y))
    text = "Sam has the parameters of this rank's stage alone"
    told = pytest.warns(autopar.NumericsWarning, match=text)
    with told if rank == 0 else contextlib.nullcontext():
        Sam(model.parameters(), 0.1)


def test_optimizers_that_are_not_torchs() -> None:
    run(warn, 2)


# -- what trains as on one device --------------------------------------------------------------


def plain_step(loop: "Loop") -> None:
    loop.model(X, Y).backward()


class Loop:
    """A loop, which may edit gradients before a step, and parameters after it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        self.kept: Any = None
        self.results: list[Tensor] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def train(self, backward: Any, before: Any, after: Any) -> None:
        for step in range(3):
            torch.manual_seed(step)
            backward(self)
            before(self)
            self.optimizer.step()
            self.optimizer.zero_grad()
            assert all(p.grad is None for p in self.parameters)
            after(self)


def backward_by_grad(loop: Loop) -> None:
    gradients = torch.autograd.grad(loop.model(X, Y), loop.parameters)
    for parameter, gradient in zip(loop.parameters, gradients, strict=True):
        parameter.grad = gradient * 0.5


def backward_of_some(loop: Loop) -> None:
    some = [p for name, p in loop.model.named_parameters() if "bias" not in name]
    loop.model(X, Y).backward(inputs=some)
    assert sum(p.grad is None for p in loop.parameters) == 2


def backward_of_one_stage(loop: Loop) -> None:
    loop.model(X, Y).backward(inputs=list(loop.model.a.parameters()))


def accumulate(loop: Loop) -> None:
    with getattr(loop.model, "no_sync", contextlib.nullcontext)():
        loop.model(X, Y).backward()
    loop.model(X * 2, Y).backward()


def hooked(loop: Loop) -> None:
    if loop.kept is None:
        loop.kept = [p.register_hook(lambda g: g / (1 + g.norm())) for p in loop.parameters]
    loop.model(X, Y).backward()


def masked_by_hooks(loop: Loop) -> None:
    if loop.kept is None:
        masks = [torch.rand(p.shape) for p in loop.parameters]
        loop.kept = [
            p.register_hook(lambda g, mask=mask: g * mask)
            for p, mask in zip(loop.parameters, masks, strict=True)
        ]
    loop.model(X, Y).backward()


def penalize_one_stage(loop: Loop) -> None:
    (0.1 * loop.model.b.weight.square().sum()).backward()
    loop.model(X, Y).backward()


def on_the_device_of_parameters(loop: Loop) -> None:
    for parameter in loop.parameters:
        loop.model(X.to(parameter.device), Y.to(parameter)).backward()


def add_noise(loop: Loop) -> None:
    for parameter in loop.parameters:
        assert parameter.grad is not None
        parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.1)
        parameter.grad += 0.1 * torch.rand(parameter.shape, device=parameter.device)


def drop_small(loop: Loop) -> None:
    for parameter in loop.parameters:
        assert parameter.grad is not None
        parameter.grad[parameter.grad.abs() < 0.01] = 0.0
        parameter.grad[0] = 0.0
        parameter.grad = parameter.grad - parameter.grad.mean()


def clip_each(loop: Loop) -> None:
    nn.utils.clip_grad_value_(loop.parameters, 0.02)
    for parameter in loop.parameters:
        nn.utils.clip_grad_norm_(parameter, 0.01)
    torch._foreach_mul_([p.grad for p in loop.parameters], 0.5)  # type: ignore[call-overload]


def decay(loop: Loop) -> None:
    for parameter in loop.parameters:
        parameter.data = parameter.data * 0.9
        parameter.data.clamp_(-1, 1)
    with torch.no_grad():
        for weight in (loop.model.a.weight, loop.model.b.weight):
            weight.div_(weight.norm(dim=0, keepdim=True).clamp(min=1))


def draw_anew(loop: Loop) -> None:
    for parameter in loop.parameters:
        if parameter.dim() > 1:
            nn.init.orthogonal_(parameter)
    loop.model.a.reset_parameters()


def average(loop: Loop) -> None:
    with torch.no_grad():
        if loop.kept is None:
            loop.kept = [p.detach().clone() for p in loop.parameters]
        torch._foreach_lerp_(loop.kept, loop.parameters, 0.3)
        for mean, parameter in zip(loop.kept, loop.parameters, strict=True):
            parameter.copy_(mean)


def average_model(loop: Loop) -> None:
    loop.kept = loop.kept or AveragedModel(loop.model)
    loop.kept.update_parameters(loop.model)
    with torch.no_grad():
        for mean, parameter in zip(loop.kept.parameters(), loop.parameters, strict=True):
            parameter.copy_(mean)
        loop.results.append(loop.kept(X, Y))


def train_copy(loop: Loop) -> None:
    loop.kept = copy.deepcopy(loop.model)
    optimizer = torch.optim.Adagrad(loop.kept.parameters(), 0.1)
    for _ in range(2):
        loss = loop.kept(X, Y)
        loss.backward()
        optimizer.step()
        loop.results.append(loss.detach())


def reload_state(loop: Loop) -> None:
    saved = copy.deepcopy(loop.optimizer.state_dict())
    loop.optimizer = torch.optim.AdamW(loop.parameters, 0.05)
    loop.optimizer.load_state_dict(saved)


def nothing(loop: Loop) -> None:
    """Changes nothing."""


BACKWARDS: tuple[Callable[[Loop], None], ...] = (
    backward_by_grad,
    backward_of_some,
    backward_of_one_stage,
    accumulate,
    hooked,
    masked_by_hooks,
    penalize_one_stage,
    on_the_device_of_parameters,
)
BEFORE: tuple[Callable[[Loop], None], ...] = (add_noise, drop_small, clip_each)
AFTER: tuple[Callable[[Loop], None], ...] = (
    decay,
    draw_anew,
    average,
    average_model,
    train_copy,
    reload_state,
)


def train(rank: int, world_size: int, given: dict[str, Any]) -> None:
    """Loops with one of each kind of change, beside the same on one process."""
    loops = [(each, nothing, nothing) for each in BACKWARDS]
    loops += [(plain_step, each, nothing) for each in BEFORE]
    loops += [(plain_step, nothing, each) for each in AFTER]
    for kinds in loops:
        plain = Regression()
        model = autopar.compile(copy.deepcopy(plain), strategy=fixed(0, pp=2), **given)
        if not given:
            model(X, Y)
        both = Loop(plain), Loop(model)
        for loop in both:
            loop.train(*kinds)
        name = [kind.__name__ for kind in kinds]
        ends = [(whole_state(loop.model), loop.results) for loop in both]
        torch.testing.assert_close(*ends, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("given", [{}, {"example_inputs": (X, Y)}], ids=["at first call", "early"])
def test_loops_may_change_all_parameters(given: dict[str, Any]) -> None:
    run(partial(train, given=given), 2)


def step_parts(rank: int, world_size: int) -> None:
    """Optimizers for two parts of a model, each of which lies on one stage."""
    plain = Regression()
    for given in ({}, {"example_inputs": (X, Y)}):
        models = (
            copy.deepcopy(plain),
            autopar.compile(copy.deepcopy(plain), strategy=fixed(0, pp=2), **given),
        )
        for model in models:
            parts = (
                torch.optim.SGD(model.a.parameters(), 0.1),
                torch.optim.AdamW(model.b.parameters(), 0.1),
            )
            for _ in range(3):
                model(X, Y).backward()
                for optimizer in parts:
                    optimizer.step()
                    optimizer.zero_grad()
        torch.testing.assert_close(whole_state(models[1]), models[0].state_dict())


def test_optimizers_of_parts() -> None:
    run(step_parts, 2)
