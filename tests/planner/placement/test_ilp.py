"""The placement program against brute force, on a cap, and its size on a stack of blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.core.ir.graph import TrainingGraph, Value, tensor_bytes, tensors
from autopar.core.ir.placement import OpStrategy, Placement, Replicate, Shard
from autopar.core.ir.roles import Gradient, Parameter
from autopar.cost_model.kernels.timing import flops_of
from autopar.errors import StrategyError
from autopar.passes.core.collective_ops import value_of
from autopar.passes.rules.local_args import local_bytes
from autopar.passes.rules.redistribute import redistribute_steps
from autopar.planner.placement.ilp import Price, Weight, solve
from autopar.planner.placement.strategies import StrategyChoices, strategy_choices
from tests.passes.parity import World
from tests.planner.blocks import GPTBlock, Stack, captured

RANKS = 2
SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1 / RANKS}


def price(value: Value, before: Placement, after: Placement) -> float:
    """1 us, and a ring at 10 GB/s."""
    made = redistribute_steps(before, after)
    assert made is not None
    shares = sum(SENT.get(step.kind, 0.0) for step in made)
    return 1e-6 + shares * tensor_bytes(value.tensor) / 1e10


def work(rate: float) -> Callable[[fx.Node, OpStrategy], float]:
    """So many operations a second, and 20 for each byte."""

    def seconds(node: fx.Node, op_strategy: OpStrategy) -> float:
        alone = flops_of(node) / rate + sum(map(tensor_bytes, tensors(node))) * 20 / rate
        shared = any(isinstance(p, Shard) for p in (*op_strategy.operands, *op_strategy.results))
        return alone / RANKS if shared else alone

    return seconds


# -- against brute force -----------------------------------------------------------------------


class Linear(nn.Module):
    """Few operators, with something to split in each."""

    def __init__(self, act: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 4))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x @ self.weight) if self.act else x @ self.weight).sum()


def uncut(value: Value, before: Placement, after: Placement) -> float:
    """The same, but nothing may be cut."""
    return inf if isinstance(after, Shard) else price(value, before, after)


@pytest.mark.parametrize(
    ("act", "rate", "price"),
    [(False, 1e7, price), (False, 1e12, price), (True, 1e9, price), (True, 1e8, uncut)],
)
def test_nothing_is_cheaper(act: bool, rate: float, price: Price) -> None:
    graph = World(Linear(act), ((torch.rand(6, 8),), {}), 1).graph(0)
    solution = solve(graph, RANKS, price, work(rate))
    best = Every(graph, strategy_choices(graph, RANKS), work(rate), price).cheapest()
    assert solution.seconds == pytest.approx(best, rel=1e-6)
    assert solution.gap <= 1e-3


def test_wrapping_counts_once() -> None:
    """A cheap optimizer's step is not worth distributed parameters; pinned, they are paid for."""
    graph = World(Linear(act=False), ((torch.rand(6, 8),), {}), 1).graph(0)

    def update(node: fx.Node, op_strategy: OpStrategy) -> float:
        return 1e-4 / (RANKS if isinstance(op_strategy.results[0], Shard) else 1)

    def found(wrapping: float, **pins: Placement) -> tuple[float, bool]:
        it = solve(graph, RANKS, price, work(1e12), update=update, wrapping=wrapping, pins=pins)
        lies = [w.results[0] for node, w in it.op_strategies.items() if node.op == "placeholder"]
        return it.seconds, any(isinstance(p, Shard) for p in lies)

    assert found(0.0)[1]
    assert not found(1e-3)[1]
    pinned = {"weight": Shard(0)}
    assert found(1e-3, **pinned)[0] == pytest.approx(found(0.0, **pinned)[0] + 1e-3)


@dataclass
class Every:
    """All combinations of ways, tried one by one; given up where they cost more than the best."""

    graph: TrainingGraph
    found: StrategyChoices
    work: Callable[[fx.Node, OpStrategy], float]
    price: Price
    op_strategies: dict[fx.Node, OpStrategy] = field(default_factory=dict)
    best: float = inf

    def cheapest(self) -> float:
        """The price of the best."""
        self.nodes = sorted(self.found.op_strategies)
        assert len([n for n in self.nodes if n.op == "call_function"]) <= 8
        self.extend(0, 0.0, frozenset())
        return self.best

    def extend(self, place: int, cost: float, paid: frozenset[object]) -> None:
        """Every way of the nodes from `place` on, the others being chosen."""
        if cost >= self.best:
            return
        if place == len(self.nodes):
            cost, _ = self.pay(cost, paid, self.at_the_end())
            self.best = min(self.best, cost)
            return
        node = self.nodes[place]
        for op_strategy in self.found.op_strategies[node]:
            self.op_strategies[node] = op_strategy
            own = self.work(node, op_strategy) if node.op == "call_function" else 0.0
            reads = zip(self.found.reads.get(node, ()), op_strategy.operands, strict=True)
            self.extend(place + 1, *self.pay(cost + own, paid, reads))

    def pay(self, cost, paid, needs):  # type: ignore[no-untyped-def]
        """What it costs to have values in some placements, each conversion once."""
        for value, after in needs:
            before = self.op_strategies[value.node].results[value.index]
            if redistribute_steps(before, after) is None:
                return inf, paid
            if before != after and (value, after) not in paid:
                cost, paid = cost + self.price(value, before, after), paid | {(value, after)}
        return cost, paid

    def at_the_end(self):  # type: ignore[no-untyped-def]
        """Results are whole, gradients lie as their parameters do."""
        inputs = dict(zip(self.graph.inputs, self.graph.placeholders, strict=True))
        for role, node in zip(self.graph.outputs, self.graph.results, strict=True):
            if node is not None:
                of_parameter = isinstance(role, Gradient) and isinstance(role.of, Parameter)
                wanted = (
                    self.op_strategies[inputs[role.of]].results[0] if of_parameter else Replicate()
                )
                yield value_of(node), wanted


def test_only_the_last_axis_cuts_unevenly() -> None:
    graph = World(Linear(True), ((torch.rand(6, 8),), {}), 1).graph(0)
    weight = graph.placeholder(Parameter("weight"))
    two = replace(graph, axes={"dp": 1, "tp": 3, "cp": 2})
    for at, want in ((graph, True), (two, False), (replace(two, partitioned=("cp",)), True)):
        lies = [
            op_strategy.results[0] for op_strategy in strategy_choices(at, 3).op_strategies[weight]
        ]
        assert (Shard(0) in lies) is want  # 8 over 3 ranks
    with pytest.raises(StrategyError, match="another axis behind"):
        strategy_choices(two, 3, {"weight": Shard(0)})


# -- memory ------------------------------------------------------------------------------------


def test_a_cap_is_kept_and_the_least_is_found() -> None:
    graph = World(Linear(True), ((torch.rand(6, 8),), {}), 1).graph(0)
    weight = graph.placeholder(Parameter("weight"))

    def held(node: fx.Node, op_strategy: OpStrategy) -> float:
        return (
            local_bytes(tensors(node)[0], op_strategy.results[0], RANKS) if node is weight else 0.0
        )

    def under(cap: float) -> Weight:
        return Weight(held, lambda value, before, after: 0.0, cap)

    cheap = solve(graph, RANKS, price, work(1e12), weight=under(128.0))
    small = solve(graph, RANKS, price, work(1e12), weight=under(100.0))
    least = solve(graph, RANKS, price, work(1e12), weight=under(1.0))
    assert cheap.nbytes == 8 * 4 * 4
    assert small.nbytes == least.nbytes == 8 * 4 * 4 / RANKS
    assert cheap.seconds < small.seconds == pytest.approx(least.seconds)


# -- on a stack of blocks ----------------------------------------------------------------------


def test_size_does_not_grow_with_depth() -> None:
    counts = []
    for depth in (3, 6):
        graph = captured(Stack(lambda: GPTBlock(64, 4), depth), (2, 32, 64))
        counts.append(len(strategy_choices(graph, RANKS).op_strategies))
    assert counts[0] == counts[1]


def test_every_layer_costs_the_same() -> None:
    def cost(depth: int) -> float:
        graph = captured(Stack(lambda: GPTBlock(64, 4), depth), (2, 32, 64))
        return solve(graph, RANKS, price, work(1e12)).seconds

    first, second, third = (cost(depth) for depth in (2, 3, 4))
    assert third - second == pytest.approx(second - first, rel=2e-3)
