"""Calls of many shapes: a bounded number of programs, and a warning that says what to do."""

import gc
import linecache
import warnings
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar._torch import forget_code_with
from autopar.core.common import notices
from autopar.errors import DisagreementError, StrategyError
from autopar.planner.placement import unmeasured
from autopar.runtime.context import MANY_SHAPES
from tests.harness.models import GPT, MODELS
from tests.harness.training import Pair, close, fixed
from tests.harness.worlds import Raised, run


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def x_of(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, 6, generator=torch.Generator().manual_seed(rows * length))


@pytest.mark.slow
def test_the_least_recently_used_program_goes_and_its_memory_too() -> None:
    model = autopar.compile(Net(), strategy="ddp", max_programs=2)
    model(x_of(2, 3)).backward()
    programs = model._execution.executor.programs
    first = next(programs.values())
    gone = [weakref.ref(first), weakref.ref(first.graph.graph), weakref.ref(first.capture)]
    del first
    for length in (4, 3, 5, 3, 4):
        model(x_of(2, length)).backward()
    assert len(programs) == 2
    assert programs.added == 4, "3 stays, 4 is compiled again after 5"
    assert gone[0]() is not None, "3 was used in between"
    model(x_of(2, 6))
    model(x_of(2, 7))
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_the_text_of_generated_code_goes_with_it() -> None:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.relu, (graph.placeholder("x"),)))
    module = torch.fx.GraphModule({}, graph)
    file = module.forward.__code__.co_filename
    forget_code_with(module)
    assert "relu" in "".join(linecache.getlines(file))
    del module, graph
    gc.collect()
    assert not linecache.getlines(file)


def said_over(shapes: Any, model: nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows, length in shapes:
            model(x_of(rows, length)).backward()
    return [str(one.message) for one in said if issubclass(one.category, autopar.AutoparWarning)]


def test_the_ninth_shape_warns_once_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "ISSUED", set())
    model = autopar.compile(Net(), strategy="ddp")
    shapes = [(2, length) for length in range(1, MANY_SHAPES + 1)]
    assert not said_over(shapes * 2, model), "modes and repeated shapes do not count"
    (told,) = said_over([(3, 1), (3, 2)], model)
    for wanted in ("(3, 1, 6)", "pad_to_bucket", "drop_last", "max_programs"):
        assert wanted in told


def test_max_programs_is_checked() -> None:
    with pytest.raises(StrategyError, match="max_programs=0"):
        autopar.compile(Net(), max_programs=0)


# -- on two ranks ------------------------------------------------------------------------------


SHAPES = [(4, 2), (6, 2), (4, 3), (4, 2), (6, 2)]


def train_with_few(rank: int, world_size: int, strategy: Any) -> list[float]:
    model = autopar.compile(
        Net().double(), strategy=strategy, example_inputs=(x_of(4, 2).double(),), max_programs=1
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for rows, length in SHAPES:
        optimizer.zero_grad()
        half = x_of(rows, length).double()
        with model.no_sync():
            model(half).backward()
        loss = model(half + 1)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", [fixed(3), fixed(0, pp=2, micro_batches=2)])
def test_one_program_suffices(strategy: Any) -> None:
    """Accumulation and shapes drop programs between a forward and its backward."""
    plain = Net().double()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wanted = []
    for rows, length in SHAPES:
        optimizer.zero_grad()
        half = x_of(rows, length).double()
        plain(half).backward()
        loss = plain(half + 1)
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    for losses in run(train_with_few, 2, strategy=strategy):
        assert losses == pytest.approx(wanted, rel=1e-9)


LENGTHS = [(4, 9), (6, 12), (4, 12), (8, 5), (4, 7), (6, 10)]


def four_blocks() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=4)


def train_in_many(rank: int, world_size: int, strategy: Any) -> bool:
    """Trains and evaluates in many shapes; returns whether some captures were derived."""
    pair = Pair(four_blocks, strategy=strategy, example_inputs=tokens(*LENGTHS[0]))
    with patch.object(unmeasured, "solve", side_effect=AssertionError("solved again")):
        for shape in LENGTHS:
            for training in (True, False):
                for model in pair.models:
                    model.train(training)
                with torch.set_grad_enabled(training):
                    losses = [model(*tokens(*shape)) for model in pair.models]
                close(losses[1], losses[0])
                for loss in losses if training else ():
                    loss.backward()
            pair.step()
    pair.check_state()
    return any(family.template for family in pair.parallel._context.families.values())


def tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    ids, targets = MODELS["gpt"].batch(rows, length)[0]
    return ids[:, :length], targets[:, :length]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [fixed(3), fixed(0, tp=2), fixed(0, pp=2, micro_batches=2)],
    ids=["zero3", "tp", "pp"],
)
def test_new_shapes_follow_the_plan_exactly(strategy: Any) -> None:
    """Nothing is solved again, and further shapes are not traced."""
    assert run(train_in_many, 2, strategy=strategy) == [True, True]


def disagree(rank: int, world_size: int) -> None:
    autopar.compile(Net(), max_programs=rank + 1)


def test_ranks_keep_as_many() -> None:
    for answer in run(disagree, 2, expect_errors=True):
        assert isinstance(answer, Raised)
        assert answer.type == DisagreementError.__name__
        assert "number of programs to keep" in answer.message
