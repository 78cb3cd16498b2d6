"""Whole pipelines on simulated ranks against the plain model on the global batch, in float64."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Gradient, Input, Output, Parameter, Tangent
from autopar.core.plan.buckets import Buckets
from autopar.errors import PassError
from autopar.passes.core.pass_base import PassResult
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.pipeline import build_pass_pipeline
from tests.harness.models import MODELS
from tests.harness.reference import relative_error, to_dtype
from tests.passes.golden import TwoLayers, two_layers
from tests.passes.parity import AXIS, EXACT, World, assert_parity

SMALL = ("gpt", "encoder", "conv", "odd")
LARGE = ("encdec", "moe")

# ranks, rows, stage, recomputation, backend, prefetch, in flight
EVERYWHERE = [(2, 6, 0, "selective", "gloo", 1, 0), (3, 7, 3, "full", "gloo", 1, 2)]
MORE = [(4, 9, 2, "none", "nccl", 0, 1), (3, 7, 1, "full", "gloo", 2, 0)]


@lru_cache(maxsize=4)
def world(name: str, ranks: int, rows: int) -> World:
    case = MODELS[name]
    batch = to_dtype(case.batch(rows, 0), torch.float64)
    return World(case.make().double(), batch, ranks, case.loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setting"),
    [(n, s) for n in (*SMALL, *LARGE) for s in (*EVERYWHERE, *(MORE if n in SMALL else ()))],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value)),
)
def test_gradients_are_those_of_the_plain_model(name: str, setting: tuple) -> None:  # type: ignore
    ranks, rows, stage, recompute, backend, prefetch, in_flight = setting
    it = world(name, ranks, rows)
    plan = it.plan(stage, recompute, prefetch=prefetch, in_flight=in_flight)
    graphs = it.lower(lambda rank: build_pass_pipeline(plan, rank, backend))
    assert_parity(it, graphs)
    assert graphs[0].notes == ()


@pytest.mark.parametrize("stages", [(0, 0), (0, 2), (2, 0), (0, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_blocks_of_different_stages_may_share_a_gradient(
    stages: tuple[int, int], backend: str
) -> None:
    """The gradient of a sum of weights is one buffer for both of its reductions."""

    class Sum(TwoLayers):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.blocks[0].weight + self.blocks[1].weight
            return F.linear(x, weight).tanh().square().mean()

    model = Sum().double()
    model.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False).double() for _ in range(2))
    it = World(model, two_layers().batch, 2)
    plan = it.plan(0)
    of_blocks = (("", 0), ("blocks.0", stages[0]), ("blocks.1", stages[1]))
    plan = replace(plan, zero_stages=of_blocks, buckets=Buckets())
    assert_parity(it, it.lower(lambda rank: build_pass_pipeline(plan, rank, backend)))


def test_more_ranks_than_rows_of_a_parameter() -> None:
    it = two_layers(ranks=4, rows=5, bias=True)
    plan = it.plan(3)
    assert_parity(it, it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo")))


class Scaled(TwoLayers):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x))) * scale


def test_gradients_enter_by_outputs_with_rows() -> None:
    """A loss outside of the graph is a mean over a rank's own rows."""
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    it = World(Scaled().double(), ((x, scale), {}), 2, torch.mean, all_tangents=True)
    plan = it.plan(3)
    graphs = it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))
    inputs = [it.values(graph, rank) for rank, graph in enumerate(graphs)]
    for values in inputs:
        values[Tangent(0)].fill_(1 / values[Tangent(0)].numel())
    results = it.run(graphs, inputs)
    for name, want in it.plain().gradients.items():
        parts = [result[Gradient(Parameter(name))] for result in results]
        assert relative_error(torch.cat(parts), want) < EXACT, name
    it.model(x, scale).mean().backward()
    for result in results:
        assert relative_error(result[Gradient(Input(1))], scale.grad) < EXACT
    outputs = torch.cat([result[Output(0)] for result in results])
    assert relative_error(outputs, it.plain().outputs[0]) < EXACT


def test_autocast() -> None:
    it = two_layers(rows=5, bias=True)
    it = World(it.model.float(), to_dtype(it.batch, torch.float32), 2)
    with torch.autocast("cpu", torch.bfloat16):
        plan = it.plan(3)
        graphs = it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))
        want = it.plain().outputs[0]
    results = it.run(graphs)[0]
    assert results[Output(0)].dtype == want.dtype
    assert {t.dtype for r, t in results.items() if isinstance(r, Gradient)} == {torch.float32}
    assert_parity(it, graphs, tolerance=2e-2)


def test_forward_only() -> None:
    it = replace(two_layers(rows=5), differentiate=False)
    plan = it.plan(3)
    graphs = it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))
    losses = [r[Output(0)] for r in it.run(graphs)]
    assert losses[0].equal(losses[1])
    assert relative_error(losses[0], it.plain().outputs[0]) < EXACT
    assert not any(isinstance(role, Gradient) for role in graphs[0].outputs)


class Forgetful(SynchronizeGradients):
    def __call__(self, graph: TrainingGraph) -> PassResult:
        return PassResult(graph)


Forgetful.__name__ = "SynchronizeGradients"


def test_a_forgotten_sum_of_gradients_is_an_error() -> None:
    """A pass that claims to synchronise gradients and does not is found by their types."""
    it = two_layers()
    passes = build_pass_pipeline(it.plan(0), 0, "gloo")
    broken = [Forgetful(AXIS, 0) if isinstance(p, SynchronizeGradients) else p for p in passes]
    with pytest.raises(PassError, match=r"t_8 is the gradient of blocks.0.weight, P\(sum\)"):
        run_passes(it.graph(0), broken)
