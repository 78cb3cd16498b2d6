"""Under batch="local", what crosses the border is DistributedDataParallel's."""

import contextlib
import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autopar
from tests.harness.worlds import run
from tests.runtime.border.test_replicated import compiled, f64, values


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return (
        nn.Linear(3, 4).to(f64),
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).to(f64),
    )


def steps(models: tuple[nn.Module, nn.Module], rank: int) -> list[Tensor]:
    """A GAN's two losses in the loop, and the gradients of inputs."""
    maker, judge = models
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    seen = []
    for step in range(2):
        x = values(10 * rank + step, 4, 3).requires_grad_()
        made = maker(x)
        real = judge(values(50 * rank + step, 4, 4))
        loss = F.softplus(-real).mean() + F.softplus(judge(made)).mean()
        loss.backward()
        assert x.grad is not None
        seen += [made.detach(), x.grad]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return seen


def like_ddp(rank: int, world_size: int) -> None:
    wanted = tuple(DistributedDataParallel(m) for m in make())
    expected = steps(wanted, rank)  # type: ignore[arg-type]
    for strategy in ("ddp", "zero3"):
        models = tuple(compiled(m, strategy, batch="local") for m in make())
        for own, other in zip(steps(models, rank), expected, strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-12)
        for model, other_model in zip(models, wanted, strict=True):
            state = model.full_state_dict()
            for name, value in other_model.module.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_two_models_in_a_row_train_as_under_ddp() -> None:
    run(like_ddp, 2)


# -- gradients that the loop computes beside calls of the model --------------------------------


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer, self.head = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.outer(self.encode(x))
        return scores


def head_beside(model: Classifier, x: Tensor) -> Tensor:
    return model(x).square().mean() + model.head(model.encode(x)).square().mean()


def methods_alone(model: Classifier, x: Tensor) -> Tensor:
    return model.outer(model.encode(x)).logsumexp(1).mean()


def weight_beside(model: Classifier, x: Tensor) -> Tensor:
    decoded = F.linear(model(x), model.outer.weight.t())
    return decoded.square().mean() + (model.inner.weight.t() @ model.inner.weight).square().sum()


def two_calls(model: Classifier, x: Tensor) -> Tensor:
    return model(x).square().mean() + model(0.5 * x).exp().mean() + model.head.bias.square().sum()


def weighed_by_own_rows(model: Classifier, x: Tensor) -> Tensor:
    """Penalties of elements of weights, whose factors are those of each rank's rows."""
    loss = model(x).square().mean()
    scaled = (1 + float(x.abs().mean())) * model.inner.weight
    rows = x[:3].abs() @ torch.ones(4, 6, dtype=f64)
    return (
        loss
        + loss.detach() * model.outer.weight.square().sum()
        + (scaled.exp().sum() + (rows * model.head.weight).sin().sum())
    )


def train_beside(model: Classifier, loss_of: Callable[..., Tensor], parts: list[Tensor]) -> None:
    """Four steps, every other one of them accumulated."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(4):
        is_held = step % 2 == 0 and isinstance(model, autopar.DistributedModule)
        with model.no_sync() if is_held else contextlib.nullcontext():
            losses = [loss_of(model, (1 + step) * part) for part in parts]
            (torch.stack(losses).sum() / len(losses)).backward()
        if step % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def step_at_once(model: Classifier, loss_of: Callable[..., Tensor], parts: list[Tensor]) -> None:
    """Each parameter is stepped by as soon as its gradient is there."""
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step_by(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step_by)
    for step in range(3):
        losses = [loss_of(model, (1 + step) * part) for part in parts]
        (torch.stack(losses).sum() / len(losses)).backward()


def gradients_beside(rank: int, world_size: int, strategy: str) -> None:
    parts = list(values(1, 8, 4).chunk(world_size))
    loops = [train_beside] * 5 + [step_at_once] * 2
    losses = (
        *(head_beside, methods_alone, weight_beside, two_calls, weighed_by_own_rows),
        *(head_beside, two_calls),
    )
    for train, loss_of in zip(loops, losses, strict=True):
        plain, model = (Classifier().to(f64) for _ in range(2))
        train(plain, loss_of, parts)
        distributed = compiled(model, strategy, batch="local")
        train(distributed, loss_of, [parts[rank]])
        state = distributed.full_state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_gradients_beside_calls_are_averaged(strategy: str) -> None:
    run(gradients_beside, 2, strategy=strategy)


# -- which dims are rows -----------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(6, 6)  # time first

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layer(x)[0], y)


class Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, prototypes: Tensor) -> Tensor:
        return (self.layer(x) @ prototypes.T).logsumexp(1).mean()


class Mixup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor, part: Tensor) -> Tensor:
        h = self.layer(part * x + (1 - part) * x.flip(0))
        return part * F.mse_loss(h, y) + (1 - part) * F.mse_loss(h, y.flip(0))


def gradients_like_ddp(model: nn.Module, inputs: tuple[Tensor, ...], rows: object = None) -> None:
    wanted = DistributedDataParallel(copy.deepcopy(model))
    parallel = compiled(model, batch="local", rows=rows)
    wanted(*inputs).backward(), parallel(*inputs).backward()
    for own, other in zip(parallel.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def rows_are_known(rank: int, world_size: int) -> list[str]:
    x, shared = values(rank, 4, 6), values(99, 4, 6)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gradients_like_ddp(Prototypes().to(f64), (x, shared), {"x": 0})
        part = torch.tensor(0.2 + 0.3 * rank, dtype=f64)
        gradients_like_ddp(Mixup().to(f64), (x, values(20 + rank, 4, 6), part))
        time_first = values(30 + rank, 5, 3, 6), values(40 + rank, 5, 3, 6)
        gradients_like_ddp(Recurrent().to(f64), time_first, 1)
    told += [str(w.message) for w in caught if "argument 2 of Mixup" in str(w.message)]
    for model, inputs in (Recurrent(), time_first), (Prototypes(), (x, shared)):
        with pytest.raises(autopar.errors.BatchError) as error:
            compiled(model.to(f64), batch="local")(*inputs)
        told.append(str(error.value))
    return told


@pytest.mark.slow
def test_rows_are_stated_or_proven() -> None:
    (mixup, recurrent, prototypes), others = run(rows_are_known, 2)
    assert len(others) == 2, "rank 0 alone warns"
    assert "has no rows and other values on other ranks" in mixup
    for message in (recurrent, prototypes):
        assert "say which dims are rows: autopar.compile(rows=0)" in message
