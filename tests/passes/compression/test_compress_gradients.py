"""Compressed sums on simulated ranks: what is not in the sum is in a residual, on some rank."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.mesh_levels import Levels
from autopar.core.ir.roles import Gradient, Parameter, State
from autopar.core.plan.compression import METHODS, Compression
from autopar.cost_model.algorithms.wire_bytes import sent_bytes
from autopar.passes.communication.bucket_collectives import BucketCollectives, propose_buckets
from autopar.passes.communication.hierarchical_collectives import PARTS, HierarchicalCollectives
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.compression.compress_gathers import CompressGathers
from autopar.passes.compression.compress_gradients import CompressGradients
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.runtime.parameters.compression_state import initial_state
from tests.passes.parity import AXIS, World, whole

FEEDBACK = "bf16(feedback=True)", "int8(feedback=True)", "sign", "topk", "randomk", "powersgd"


class Odd(nn.Module):
    """Matrices, vectors and a single number, none of which divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(33, 29), nn.Linear(29, 7)])
        self.scale = nn.Parameter(torch.ones(1))
        self.idle = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.blocks[0](x)) * self.scale
        return self.blocks[1](hidden).square().mean() + self.idle.sum()


def world(ranks: int, scale: float = 1.0) -> World:
    x = torch.randn(12, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return World(Odd().double(), ((x * scale,), {}), ranks)


def passes(
    it: World, rank: int, zero: int, text: str, levels: tuple[Levels, ...] = ()
) -> Iterator[Pass]:
    before = (
        AssignBatchAxis(AXIS),
        ShardParameters(AXIS, rank, tuple((b, zero) for b in ("", "blocks.0", "blocks.1"))),
        SynchronizeGradients(AXIS, rank),
    )
    yield from before
    buckets = propose_buckets(run_passes(it.graph(rank), before), 4000, 4000)
    yield BucketCollectives(buckets)
    yield CompressGradients(buckets.reduce, (text,) * len(buckets.reduce), rank, levels)
    yield from (HierarchicalCollectives(own) for own in levels)
    yield LowerCollectives("gloo", rank)


def compressed(it: World, zero: int, text: str, within: int = 1) -> list[TrainingGraph]:
    """Every rank's graph; where there are several neighbours, all goes by level."""
    own = Levels(AXIS, within, tuple((method, 0) for method in METHODS if method != "powersgd"))
    if within > 1 and text.startswith("powersgd"):  # whose sums of factors are sums like others
        own = replace(own, from_bytes=tuple((kind, 0) for kind in PARTS))
    axes, levels = {AXIS: it.ranks} | own.sizes(it.ranks), (own,) if within > 1 else ()
    return [
        run_passes(replace(it.graph(rank), axes=axes), passes(it, rank, zero, text, levels))
        for rank in range(it.ranks)
    ]


States = list[dict[State, Tensor]]


def states_of(graphs: list[TrainingGraph]) -> States:
    """What each rank keeps before the first step."""
    return [
        {
            role: initial_state(role, node.meta["val"])
            for role, node in zip(graph.inputs, graph.placeholders, strict=True)
            if isinstance(role, State)
        }
        for graph in graphs
    ]


def step(it: World, graphs: list[TrainingGraph], states: States) -> dict[str, Tensor]:
    """The gradients of a step; it writes the states."""
    inputs = [{**it.values(g, r), **states[r]} for r, g in enumerate(graphs)]
    results = it.run(graphs, inputs)
    found = {}
    for role in graphs[0].outputs:
        if isinstance(role, Gradient) and isinstance(role.of, Parameter):
            parts = [own[role] for own in results]
            if all(part is not None for part in parts):
                found[role.of.name] = whole(role.of.name, graphs[0], parts)  # type: ignore[arg-type]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("text", FEEDBACK)
@pytest.mark.parametrize(("ranks", "within"), [(3, 1), (6, 3)])
def test_what_is_not_sent_is_kept(ranks: int, within: int, text: str, zero: int) -> None:
    """Over several steps all that gradients say arrives, but for what residuals hold."""
    it, steps = world(ranks), 3
    graphs = compressed(it, zero, text, within)
    states, total = states_of(graphs), dict[str, Tensor]()
    for _ in range(steps):
        for name, gradient in step(it, graphs, states).items():
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
    kept = dict[str, Tensor]()
    for own in states:
        for role, value in own.items():
            if role.kind == "residual":
                kept[role.name] = kept.get(role.name, torch.zeros_like(value)) + value
    assert any(value.abs().max() > 0 for value in kept.values())
    for name, want in it.plain().gradients.items():
        have = total[name] + kept.get(name, torch.zeros_like(total[name]))
        assert torch.allclose(have, steps * want, rtol=1e-10, atol=1e-12), name


NEAR = {"bf16": 1e-2, "fp16": 1e-3, "int8": 4e-2}
"""Rounded on either rank and again in the sum, whose parts may be larger than it is."""


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(("text", "bound"), NEAR.items())
def test_casts_and_int8_are_near(text: str, bound: float, zero: int) -> None:
    it = world(2)
    graphs = compressed(it, zero, text)
    found = step(it, graphs, states_of(graphs))
    for name, want in it.plain().gradients.items():
        if want.numel():
            assert (found[name] - want).abs().max() <= bound * want.abs().max(), name


@pytest.mark.parametrize("ranks", [2, 4])
def test_powersgd_of_the_full_rank_is_exact(ranks: int) -> None:
    """Twelve rows give gradients of rank 12 at most; the factors need not find them twice."""
    it = world(ranks)
    graphs = compressed(it, 0, "powersgd(rank=12)")
    found = step(it, graphs, states_of(graphs))
    for name, want in it.plain().gradients.items():
        assert torch.allclose(found[name], want, rtol=1e-8, atol=1e-12), name


@pytest.mark.parametrize(
    ("ranks", "within", "text"),
    [*((2, 1, method) for method in METHODS), (4, 2, "int8"), (4, 2, "topk")],
)
def test_overflow_shows_and_leaves_what_is_kept(ranks: int, within: int, text: str) -> None:
    it = world(ranks)
    graphs = compressed(it, 0, text, within)
    states = states_of(graphs)
    step(it, graphs, states)
    before = [{role: value.clone() for role, value in own.items()} for own in states]
    name, value = "blocks.0.weight", it.state["blocks.0.weight"].clone()
    it.state[name] = torch.full_like(value, float("nan"))
    found = step(it, graphs, states)
    it.state[name] = value
    assert not all(gradient.isfinite().all() for gradient in found.values())
    for own, old in zip(states, before, strict=True):
        for role, kept in own.items():
            assert role.kind == "count" or kept.equal(old[role]), role


def test_complex_gradients_travel_as_they_are() -> None:
    """The graph says so; nothing stands in the way of the other buckets."""

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.ones(3, dtype=torch.complex128))
            self.blocks = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x: Tensor) -> Tensor:
            return (self.blocks[0](x) * self.phase).abs().square().mean()

    it = World(Complex().double(), ((torch.randn(4, 3, dtype=torch.float64),), {}), 2)
    it.state["phase"] = it.state["phase"].to(torch.complex128)
    graphs = compressed(it, 0, "bf16")
    assert any("phase is not compressed" in note for note in graphs[0].notes)
    found = step(it, graphs, states_of(graphs))
    assert torch.allclose(found["phase"], it.plain().gradients["phase"])


@pytest.mark.parametrize(
    ("text", "ratio"), [("bf16", 1.9), ("int8", 3.5), ("topk", 40), ("powersgd(rank=1)", 10)]
)
def test_less_is_sent(text: str, ratio: float) -> None:
    """Of a bucket large enough that what is rounded up does not count."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(256, 256, bias=False) for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)).square().mean()

    it = World(Wide(), ((torch.randn(4, 256),), {}), 2)
    sizes = [sent_bytes(compressed(it, 0, t)[0], "gloo")[AXIS] for t in ("", text)]
    assert sizes[0] / sizes[1] >= ratio


def test_every_rank_computes_with_the_same_decoded_parameters() -> None:
    """The simulator holds what is typed Replicate against each other; gradients stay near."""
    it = world(3)

    def with_gathers(rank: int) -> Iterator[Pass]:
        for item in passes(it, rank, 3, ""):
            if isinstance(item, CompressGradients):
                graph = run_passes(it.graph(rank), list(passes(it, rank, 3, ""))[:3])
                buckets = propose_buckets(graph, 4000, 4000)
                pairs = ((group, "int8") for group in buckets.gather)
                again = ((group, "bf16") for group in buckets.regather)
                yield CompressGathers(tuple(pairs), tuple(again))
            else:
                yield item

    graphs = it.lower(with_gathers)
    found = step(it, graphs, states_of(graphs))
    for name, want in it.plain().gradients.items():
        if want.numel():
            assert (found[name] - want).abs().max() <= 0.2 * want.abs().max(), name


def test_options_out_of_range_are_refused() -> None:
    for text in ("int7", "powersgd(rank=0)", "topk(density=2)", "int8(block=3)", "topk(k=3)"):
        with pytest.raises(ValueError, match=r"compression|rank|density"):
            Compression.of(text)
