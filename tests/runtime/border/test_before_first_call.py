"""Parameters that a loop uses before the first call of the model shards them."""

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import Pair, close, fixed
from tests.harness.worlds import Raised, run

STRATEGIES = [{"zero": 1}, {"zero": 3}, {"tp": 2}, {"pp": 2, "micro_batches": 2}]
X = torch.arange(24, dtype=torch.float64).view(6, 4).sin()


class Layers(nn.Sequential):
    """Two layers."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4))


def of_options(options: dict[str, int]) -> autopar.Strategy:
    return fixed(**{"zero": 0, **options})


def accumulate(rank: int, world_size: int, options: dict[str, int]) -> None:
    """A penalty is backpropagated before the first loss; the second window begins with a loss."""
    pair = Pair(Layers, strategy=of_options(options))
    for model in pair.models:
        sum(p.square().sum() for p in model.parameters()).backward()
        model(X).square().mean().backward()
    pair.check_gradients()
    pair.step()
    pair.check_state()


@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_gradients_of_earlier_losses_stay(options: dict[str, int]) -> None:
    run(accumulate, 2, options=options)


def gradients_before_compile(rank: int, world_size: int, options: dict[str, int]) -> Tensor | None:
    model = Layers().double()
    model(X).sum().backward()
    compiled = autopar.compile(model, strategy=of_options(options))
    (gradient,) = (p.grad for name, p in compiled.named_parameters() if name == "0.bias")
    return None if gradient is None else gradient.full_tensor()


def test_gradients_of_the_plain_model_stay() -> None:
    model = Layers().double()
    model(X).sum().backward()
    for gradient in run(gradients_before_compile, 2, options={"zero": 3}):
        torch.testing.assert_close(gradient, model[0].bias.grad)


def use_earlier(rank: int, world_size: int, options: dict[str, int]) -> None:
    model = autopar.compile(Layers().double(), strategy=of_options(options), fallback=False)
    model(X + model[0].weight[0]).square().mean().backward()


@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 3}, STRATEGIES[-1]], ids=str)
def test_graphs_of_earlier_values_are_refused(options: dict[str, int]) -> None:
    answers = run(use_earlier, 2, options=options, expect_errors=True)
    for answer in answers:
        assert isinstance(answer, Raised)
        assert answer.type == "StrategyError"
        assert "before the first call" in answer.message
        assert "example_inputs" in answer.message


def look(rank: int, world_size: int) -> None:
    """A sum that is kept to be logged takes part in no backward."""
    pair = Pair(Layers, strategy=fixed(3))
    plain, parallel = (next(model.parameters()).sum() for model in pair.models)
    for model in pair.models:
        model(X).square().mean().backward()
    pair.check_gradients()
    close(parallel, plain)


def test_values_that_are_only_read_may_be_kept() -> None:
    run(look, 2)


def train_frozen(rank: int, world_size: int, options: dict[str, int], batch: str) -> None:
    """A frozen weight is sharded by the first call, and trained from the third step on."""
    pair = Pair(Layers, strategy=of_options(options), batch=batch)
    own = slice(rank, None, world_size) if batch == "local" else slice(None)
    for model in pair.models:
        model[1].weight.requires_grad_(False)
    for step in range(4):
        if step == 2:
            for model in pair.models:
                model[1].weight.requires_grad_()
        pair.plain(X).square().mean().backward()
        pair.parallel(X[own]).square().mean().backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


@pytest.mark.parametrize("batch", ["local", "global"])
@pytest.mark.parametrize("options", STRATEGIES[:2], ids=str)
def test_frozen_parameters_are_sharded(options: dict[str, int], batch: str) -> None:
    run(train_frozen, 2, options=options, batch=batch)
