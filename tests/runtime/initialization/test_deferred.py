"""Models on the meta device under plans: their values, and the memory that starting them takes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import ModelError
from autopar.runtime.parameters.distribute import is_remote
from tests.harness.models import MODELS
from tests.harness.training import close, fixed, whole_state
from tests.harness.worlds import Raised, run
from tests.runtime.pipeline.test_stage_parameters import plan_of

GPT = MODELS["gpt"]
INPUTS = GPT.batch(4, 0)[0]


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return GPT.make()


def assert_same_bits(have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    different = [name for name in want if not torch.equal(have[name], want[name])]
    assert not different


def start_on_meta(rank: int, world_size: int, setups: list[dict[str, Any]]) -> None:
    """Values of rank 0's seed, whether the plan is known at once or at the first call."""
    plain = GPT.make()
    for options in setups:
        torch.manual_seed(rank)
        model = autopar.compile(on_meta(), fallback=False, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(7)  # later draws of the user change nothing
        loss = model(*INPUTS)
        assert_same_bits(whole_state(model), plain.state_dict())
        assert model.head.weight is model.embedding.token.weight
        loss.backward()
        optimizer.step()
        trained = GPT.make()
        trained(*INPUTS).backward()
        torch.optim.SGD(trained.parameters(), lr=0.1).step()
        close(whole_state(model), trained.state_dict(), 1e-5)


def setups() -> list[dict[str, Any]]:
    strategies = [fixed(0), fixed(3), fixed(2, tp=2), fixed(0, pp=2)]
    late = [{"strategy": strategy} for strategy in strategies]
    return late + [{**options, "example_inputs": INPUTS} for options in late]


@pytest.mark.slow
def test_values_are_the_same_under_every_plan() -> None:
    run(start_on_meta, 2, setups=setups())


@pytest.mark.slow
def test_values_are_the_same_on_four_ranks() -> None:
    plans = [fixed(3, tp=2), fixed(0, pp=2, tp=2), fixed(3, pp=2)]
    given = [{"strategy": strategy, "example_inputs": INPUTS} for strategy in plans]
    run(start_on_meta, 4, setups=given)


def try_on_meta(rank: int, world_size: int) -> None:
    """Trials run on copies with other values, and leave the model's alone."""
    model = autopar.compile(on_meta(), strategy=fixed(3))
    for pp in (1, 2):
        trial = model.copy_with_plan(plan_of(2, pp))
        trial(*INPUTS).backward()
        assert any(is_remote(p) for p in trial.parameters()) == (pp == 2)
    assert all(is_remote(p) for p in model.parameters())
    assert_same_bits(whole_state(model), GPT.make().state_dict())


def test_trials_need_no_values() -> None:
    run(try_on_meta, 2)


def use_before_first_call(rank: int, world_size: int) -> None:
    plain, other = GPT.make(), GPT.make()
    for parameter in other.parameters():
        parameter.data.mul_(2).add_(1)
    changed = other.state_dict()
    for options in ({}, {"example_inputs": INPUTS}):
        given: dict[str, Any] = {"strategy": fixed(3), **options}
        model = autopar.compile(on_meta(), **given)
        assert_same_bits(whole_state(model), plain.state_dict())
        model = autopar.compile(on_meta(), **given)
        average = torch.optim.swa_utils.AveragedModel(model)
        assert_same_bits(whole_state(average.module), plain.state_dict())
        model = autopar.compile(on_meta(), **given)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({**changed, "norm.weight": torch.zeros(5)})
        assert not model.load_state_dict(changed).missing_keys
        model(*INPUTS)
        assert_same_bits(whole_state(model), changed)
        model = autopar.compile(on_meta(), **given)
        model.load_state_dict({"norm.bias": changed["norm.bias"]}, strict=False)
        assert len(list(model.parameters())) == len(list(plain.parameters()))
        wanted = {**plain.state_dict(), "norm.bias": changed["norm.bias"]}
        assert_same_bits(whole_state(model), wanted)
    model = autopar.compile(on_meta(), strategy=fixed(3))
    model.load_state_dict(changed)
    changed["norm.bias"].zero_()
    with pytest.raises(autopar.StrategyError, match="has changed since"):
        model(*INPUTS)


@pytest.mark.slow
def test_values_are_given_at_the_first_use() -> None:
    run(use_before_first_call, 2)


class Unset(nn.Module):
    """A scale that only the constructor initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * self.scale).square().mean()


def start_without_values(rank: int, world_size: int, **options: Any) -> None:
    with torch.device("meta"):
        model = Unset()
    autopar.compile(model, **options)(torch.randn(4, 4))


@pytest.mark.slow
def test_ranks_fail_together_without_initialisation() -> None:
    for strategy in (fixed(3), fixed(0, pp=2)):
        for answer in run(start_without_values, 2, strategy=strategy, expect_errors=True):
            assert isinstance(answer, Raised)
            assert answer.type == ModelError.__name__
            assert "scale on the meta device got no value" in answer.message


def train_fallback(rank: int, world_size: int) -> None:
    class Branch(Unset):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > -1e9 else x.sum()

    torch.manual_seed(0)
    plain = Branch()
    with torch.device("meta"):
        model = Branch()
    torch.manual_seed(0)
    parallel = autopar.compile(model, init_fn=ones_if_scale, strategy="ddp")
    x = torch.arange(16.0).view(4, 4)
    close(parallel(x), plain(x), 1e-6)


def ones_if_scale(module: nn.Module) -> None:
    if isinstance(module, Unset):
        nn.init.ones_(module.scale)


def test_models_that_cannot_be_captured_get_values() -> None:
    run(train_fallback, 2)
