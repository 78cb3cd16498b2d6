"""A model that fails by itself is told so, and is not trained in another way."""

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from tests.harness.training import fixed
from tests.harness.worlds import run

X = torch.ones(4, 4)


class Faulty(nn.Module):
    """Fails in the way that a test names."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        table = {"loss": self.layer(x).square().mean()}
        if self.fault == "shape":
            return self.layer(x[:, :3]).mean()
        if self.fault == "attribute":
            return self.missing(x)
        return table[self.fault or "loss"]


FAULTS = {
    "shape": (RuntimeError, "mat1 and mat2 shapes cannot be multiplied"),
    "attribute": (AttributeError, "no attribute 'missing'"),
    "key": (KeyError, "'key'"),
}


@pytest.mark.parametrize("fallback", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_users_line_and_error(fault: str, fallback: bool, caplog: Any) -> None:
    kind, message = FAULTS[fault]
    model, state = Faulty(fault), torch.get_rng_state()
    compiled = autopar.compile(model, strategy=fixed(0), fallback=fallback)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(autopar.ModelError, match=message) as raised:
            compiled(X)
    text = str(raised.value)
    assert text.startswith(f"your model raised {kind.__name__} at {__file__}:")
    assert "fallback" not in text
    assert len(text) < 400
    assert isinstance(raised.value.__cause__, kind)
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_fault_in_a_later_call() -> None:
    model = autopar.compile(Faulty(), strategy=fixed(0))
    model(X).backward()
    with pytest.raises(autopar.ModelError, match="mat1 and mat2 shapes"):
        model(X[:, :3])


def test_too_many_arguments_have_no_line() -> None:
    with pytest.raises(autopar.ModelError, match=r"your model raised TypeError: .*positional"):
        autopar.compile(Faulty(), strategy=fixed(0))(X, X)


def fail(rank: int, world_size: int, early: bool) -> None:
    given = {"example_inputs": (X,)} if early else {}
    autopar.compile(Faulty("key"), strategy="ddp", **given)(X)


@pytest.mark.parametrize("early", [True, False])
def test_every_rank_is_told(early: bool) -> None:
    for answer in run(fail, 2, expect_errors=True, early=early):
        assert answer[0] == "ModelError"
        assert "your model raised KeyError" in answer[1]


class Exporting(nn.Module):
    """Runs by itself, but no graph can hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.from_numpy(x.numpy().mean(0))
        return (self.layer(x) * weights).mean()


def test_what_only_tracing_cannot_do_falls_back() -> None:
    model = autopar.compile(Exporting(), strategy=fixed(0))
    with pytest.warns(UserWarning, match="runs the model as it is"):
        model(X).backward()
    with pytest.raises(autopar.CaptureError, match=r"x\.numpy"):
        autopar.compile(Exporting(), strategy=fixed(0), fallback=False)(X)


def test_a_compiled_model_is_compiled_once() -> None:
    model = autopar.compile(Faulty(), strategy=fixed(0))
    for made in (model, nn.Sequential(model)):
        with pytest.raises(autopar.StrategyError, match=r"compiled by autopar\.compile before"):
            autopar.compile(made)
    with pytest.raises(autopar.StrategyError, match=r"compiled by autopar\.compile before"):
        autopar.plan(model, 2, example_inputs=X)


@pytest.mark.parametrize("called", [True, False])
def test_pickle_is_refused_and_copies_are_made(called: bool) -> None:
    model = autopar.compile(Faulty(), strategy=fixed(0))
    if called:
        model(X)
    for save in (lambda m: torch.save(m, io.BytesIO()), pickle.dumps):
        with pytest.raises(autopar.StrategyError, match=r"Save model.state_dict\(\)"):
            save(model)
    shared, own = copy.copy(model), copy.deepcopy(model)
    assert torch.equal(shared(X), own(X))
    assert shared.get_parameter("layer.weight") is model.get_parameter("layer.weight")
    assert own.get_parameter("layer.weight") is not model.get_parameter("layer.weight")


class Loop:
    """Holds an open file, as a progress bar does, and reads results."""

    def __init__(self, path: Path) -> None:
        self.log = path.open("w")
        self.seen = 0

    def read(self, model: nn.Module, args: Any, result: Tensor) -> None:
        self.seen += 1


def test_copies_call_hooks_of_the_same_loop(tmp_path: Path) -> None:
    model, loop = autopar.compile(Faulty(), strategy=fixed(0)), Loop(tmp_path / "log")
    handle = model.register_forward_hook(loop.read)
    own = copy.deepcopy(model)
    handle.remove()
    model(X), own(X)
    assert loop.seen == 1
