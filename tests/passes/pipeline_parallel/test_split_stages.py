"""Stages compute what the model computes, for any cuts and micro-batches."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.core.ir.aliases import extent_bytes
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import (
    BatchTotal,
    Gradient,
    MicrobatchPartial,
    Parameter,
    StageInput,
    StageOutput,
)
from autopar.errors import StrategyError
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.passes.golden import two_layers
from tests.passes.parity import EXACT, World
from tests.passes.pipelines import Pipeline, cut, users

f64 = torch.float64


def world(name: str, micro_batches: int, rows: int = 4) -> World:
    spec = MODELS[name]
    return World(spec.make().double(), to_dtype(spec.batch(rows, 0), f64), micro_batches, spec.loss)


@pytest.mark.slow
@pytest.mark.parametrize("in_two", [False, True], ids=["whole", "in two"])
@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [("gpt", 1), ("gpt", 2), ("encdec", 2), ("odd", 1), ("conv", 1), ("moe", 1), ("moe", 2)],
)
def test_stages_equal_the_model(name: str, micro_batches: int, in_two: bool) -> None:
    it = world(name, micro_batches)
    count = len(users(it.capture(0).graph))
    for places in ([1], [count // 2], [count - 1], [count // 4, count // 2, 3 * count // 4]):
        errors = Pipeline(it, cut(it, places), in_two).run()
        assert max(errors.values()) <= EXACT, (places, errors)


def test_a_tied_weight_is_summed_by_each_stage_that_uses_it() -> None:
    it = world("gpt", 2)
    count = len(users(it.capture(0).graph))
    first, last = cut(it, [count // 2]).stages
    (tied,) = set(first.parameters) & set(last.parameters)
    for graph in (first, last):
        assert graph.result(Gradient(Parameter(tied))) is not None
    rows = 2 * 12 * 32  # of one micro-batch
    traveling = [*sent(first), *sent(last)]
    assert all(t.numel() <= rows for t in traveling), "the gradient does not travel"


def sent(graph: TrainingGraph) -> list[Tensor]:
    pairs = zip(graph.outputs, graph.results, strict=True)
    return [n.meta["val"] for r, n in pairs if isinstance(r, StageOutput) and n is not None]


class Skips(nn.Module):
    """The last layer reads a value of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first = torch.tanh(self.layers[0](x))
        z = torch.tanh(self.layers[2](torch.tanh(self.layers[1](first))))
        return F.mse_loss(self.layers[3](z + first), y)


def skips(micro_batches: int) -> World:
    torch.manual_seed(1)
    batch = (torch.randn(4, 5, dtype=f64), torch.randn(4, 5, dtype=f64))
    return World(Skips().double(), (batch, {}), micro_batches)


def test_values_that_skip_stages_are_passed_on_once() -> None:
    it = skips(2)
    stages = cut(it, [1, 2, 3])
    assert max(Pipeline(it, stages).run().values()) <= EXACT
    travels = [len([r for r in g.outputs if isinstance(r, StageOutput) and r.phase == "forward"])
               for g in stages.stages]  # fmt: skip
    assert travels == [1, 2, 1, 0]  # the third stage adds them
    for below, above in zip(stages.stages, stages.stages[1:], strict=False):
        up = {(r.value, r.phase) for r in below.outputs if isinstance(r, StageOutput)}
        down = {(r.value, r.phase) for r in above.outputs if isinstance(r, StageOutput)}
        came = {(r.value, r.phase) for r in above.inputs if isinstance(r, StageInput)}
        back = {(r.value, r.phase) for r in below.inputs if isinstance(r, StageInput)}
        assert {v for v in up if v[1] == "forward"} == {v for v in came if v[1] == "forward"}
        assert {v for v in down if v[1] == "backward"} == {v for v in back if v[1] == "backward"}


class Stacks(nn.Module):
    """The gradient of each layer's result is a slice of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.stack([torch.tanh(layer(x)) for layer in self.layers], 1), y)


def test_messages_have_no_gaps() -> None:
    torch.manual_seed(1)
    batch = (torch.randn(4, 5, dtype=f64), torch.randn(4, 3, 5, dtype=f64))
    it = World(Stacks().double(), (batch, {}), 2)
    stages = cut(it, [1, 2])
    assert max(Pipeline(it, stages).run().values()) <= EXACT
    for graph in stages.stages:
        pairs = zip(graph.inputs, graph.placeholders, strict=True)
        received = [n.meta["val"] for role, n in pairs if isinstance(role, StageInput)]
        assert received
        assert all(extent_bytes(each) == each.nbytes for each in received)


def test_inputs_are_not_sent() -> None:
    """Each stage computes targets, masks and positions itself."""
    stages = cut(world("gpt", 1), [3, 6]).stages
    assert all(t.is_floating_point() and t.dim() > 1 for g in stages for t in sent(g))


def test_counts_of_targets_are_known_before_the_losses() -> None:
    stages = cut(world("gpt", 2), [4])
    assert stages.prologue is not None
    assert not stages.has_late_totals
    early = [r for g in stages.stages for r in g.inputs if isinstance(r, BatchTotal)]
    assert early
    assert not any(r.late for r in early)
    assert any(isinstance(r, MicrobatchPartial) for r in stages.stages[1].outputs)


class Squared(nn.Module):
    """The gradient depends on the loss of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y).square() + self.layers[0].weight.square().mean()


def test_totals_that_backwards_need_are_late() -> None:
    it = skips(2)
    it = World(Squared().double(), it.batch, 2)
    stages = cut(it, [1])
    assert stages.has_late_totals
    assert max(Pipeline(it, stages).run().values()) <= EXACT


def test_batch_norm_couples_micro_batches() -> None:
    it = world("conv", 2)
    with pytest.raises(StrategyError, match=r"models\.py:\d+.*micro_batches=1"):
        cut(it, [3])


def test_empty_stages_are_refused() -> None:
    it = two_layers(ranks=1)
    with pytest.raises(StrategyError, match="fewer layers than stages"):
        cut(it, [1, 2, 3])


def test_frozen_stages_have_no_backward() -> None:
    it = skips(1)
    for parameter in it.model.layers[0].parameters():  # type: ignore[union-attr,index]
        parameter.requires_grad_(False)
    it = replace(it)
    stages = cut(it, [1, 2])
    assert max(Pipeline(it, stages).run().values()) <= EXACT
    assert not any(isinstance(r, Gradient) for r in stages.stages[0].outputs)
