"""Captures of further shapes are derived where that is proved, and equal those that are traced."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import shape_family
from autopar.capture.call import Call, batch_shard_of, flattened
from autopar.capture.model_info import describe_parameters
from autopar.capture.shape_family import ShapeFamily
from autopar.capture.trace import Capture, capture, capture_symbolically
from benchmarks.models import GPT
from tests.harness.models import MODELS

CPU = torch.device("cpu")


def call_of(inputs: Any) -> Call:
    return batch_shard_of(*flattened(inputs), mode="global", rank=0, ranks=1).call


def tokens(rows: int, length: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(64, (rows, length))
    return ids, ids


def floats(rows: int, length: int) -> tuple[Tensor]:
    return (torch.randn(rows, length, 8),)


def captures_of(model: nn.Module, calls: list[Call]) -> tuple[ShapeFamily, list[Capture], int]:
    """The captures of calls in turn, and how many were traced."""
    parameters, family = describe_parameters(model), ShapeFamily()
    traced = []

    def trace(call: Call) -> Capture:
        traced.append(call)
        return capture(model, call, parameters, device=CPU)

    def trace_symbolically(call: Call, sizes: Any, compiled: frozenset[Any]) -> Capture:
        return capture_symbolically(model, call, parameters, sizes, device=CPU, compiled=compiled)

    made = [family.capture(call, trace, trace_symbolically) for call in calls]
    return family, made, len(traced)


def check_equal_to_traced(model: nn.Module, calls: list[Call], made: list[Capture]) -> None:
    for call, derived in zip(calls, made, strict=True):
        traced = capture(model, call, describe_parameters(model), device=CPU)
        ours, theirs = derived.graph, traced.graph
        assert ours.inputs == theirs.inputs
        assert ours.outputs == theirs.outputs
        pairs = zip(ours.graph.nodes, theirs.graph.nodes, strict=True)
        for one, other in pairs:
            assert shape_family._described(one) == shape_family._described(other)
            keys = ("phase", "block", "source")
            assert [one.meta.get(k) for k in keys] == [other.meta.get(k) for k in keys]


SHAPES = [(4, 8), (6, 24), (8, 16), (3, 31), (4, 32), (5, 5), (2, 100)]


def gpt() -> nn.Module:
    return GPT(5, 64, tied=True, width=16, heads=2)


class Cases(nn.Module):
    """Sizes in Python: slices, positions, divisions and means over counted elements."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        places = torch.arange(length, device=x.device) / 64
        x = self.mix(x) + places[:, None]
        halves = x[:, : length // 2].sum(1) + x[:, length // 2 :].sum(1)
        self.seen.add_(halves.detach().mean(0))
        joined = torch.cat([x, x.flip(1)], dim=1).reshape(rows * 2, length, 8)
        return joined.square().sum() / (rows * length) + F.pad(halves, (0, 3)).mean()


@pytest.mark.parametrize(
    ("make", "inputs"), [(gpt, tokens), (Cases, floats)], ids=["gpt", "sizes in Python"]
)
def test_derived_captures_equal_traced_ones(
    make: Callable[[], nn.Module], inputs: Callable[..., Any]
) -> None:
    model, calls = make(), [call_of(inputs(*shape)) for shape in SHAPES]
    family, made, traced = captures_of(model, calls)
    assert family.template is not None
    assert traced == 2, "the third is derived from the first two"
    check_equal_to_traced(model, calls, made)


class Branching(nn.Module):
    """Computes otherwise for long rows, and for one row."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.one if x.shape[1] < 20 else self.two
        return layer(x).square().mean()


def test_calls_that_take_another_branch_are_traced() -> None:
    model, shapes = Branching(), [(4, 8), (6, 12), (8, 16), (3, 19), (3, 20), (1, 8), (4, 40)]
    calls = [call_of(floats(*shape)) for shape in shapes]
    _, made, traced = captures_of(model, calls)
    assert traced == 2 + 3
    check_equal_to_traced(model, calls, made)


class Table(nn.Module):
    """Reads a table that Python makes for the length."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tensor([1.0 / (1 + i) for i in range(x.shape[1])])
        return (self.mix(x) * weights[:, None]).mean()


class Counting(nn.Module):
    """Keeps the last length as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.length = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        return self.mix(x).mean()


@pytest.mark.parametrize("make", [Table, Counting])
def test_what_depends_on_sizes_in_python_is_traced(make: Callable[[], nn.Module]) -> None:
    model, calls = make(), [call_of(floats(*shape)) for shape in SHAPES]
    family, made, traced = captures_of(model, calls)
    assert family.template is None
    assert traced == len(calls)
    assert family.attempts <= shape_family.MOST_ATTEMPTS
    check_equal_to_traced(model, calls, made)


def test_strides_and_further_dims_are_conditions() -> None:
    """Another order of dims in memory, or a dim that never differed, has its own capture."""
    model = Branching()
    wide = [call_of(floats(*shape)) for shape in [(4, 8), (4, 12), (4, 16)]]
    swapped = call_of((torch.randn(8, 4, 8).transpose(0, 1),))
    more_rows = call_of(floats(5, 9))
    calls = [*wide, swapped, more_rows, call_of(floats(7, 10))]
    family, made, traced = captures_of(model, calls)
    assert traced == 2 + 1, "rows join the symbols once they differ"
    assert family.attempts == 2
    check_equal_to_traced(model, calls, made)


def test_a_template_that_does_not_fit_is_dropped() -> None:
    calls = [call_of(floats(*shape)) for shape in SHAPES]
    wrong = shape_family.CapturesDiffer("for the test")
    with patch.object(shape_family.Template, "check", side_effect=wrong):
        family, _, traced = captures_of(Branching(), calls[:4])
    assert family.template is None
    assert traced == 4


@pytest.mark.parametrize("name", ["conv", "gpt"])
def test_models_of_the_harness(name: str) -> None:
    case = MODELS[name]
    model = case.make()
    calls = [call_of(case.batch(rows, 0)[0]) for rows in (4, 6, 8, 9)]
    _, made, _ = captures_of(model, calls)
    check_equal_to_traced(model, calls, made)
