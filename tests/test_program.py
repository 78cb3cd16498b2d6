"""The placement program against brute force, and its size on a transformer."""

from itertools import product
from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.cost_model.timing import flops_of
from autopar.graph import Gradient, Parameter, TrainingGraph, tensor_bytes, tensors
from autopar.passes.rules.conversions import steps
from autopar.passes.rules.loops import Way
from autopar.placement import Placement, Replicate, Shard
from autopar.planner.program import solve
from autopar.planner.ways import Value, choices, value_of
from tests.passes.parity import World

SENT = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}


def sent(value: Value, before: Placement, after: Placement, ranks: int) -> float:
    """Bytes that a rank sends for a conversion, over (ranks - 1) / ranks."""
    whole = tensor_bytes(value.tensor)
    made = steps(before, after)
    assert made is not None
    return sum(SENT.get(s.kind, 1 / ranks) * whole for s in made if s.collective)


def price(ranks: int):  # type: ignore[no-untyped-def]
    return lambda value, before, after: 1e-6 + sent(value, before, after, ranks) / 1e10


def work(rate: float, ranks: int):  # type: ignore[no-untyped-def]
    def seconds(node: fx.Node, way: Way) -> float:
        alone = flops_of(node) / rate + sum(map(tensor_bytes, tensors(node))) * 20 / rate
        shared = any(isinstance(p, Shard) for p in (*way.operands, *way.results))
        return alone / ranks if shared else alone

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


@pytest.mark.parametrize(("act", "rate"), [(False, 1e7), (False, 1e12), (True, 1e9)])
def test_nothing_is_cheaper(act: bool, rate: float) -> None:
    graph = World(Linear(act), ((torch.rand(6, 8),), {}), 1).graph(0)
    solution = solve(graph, 2, price(2), work(rate, 2))
    assert solution.seconds == pytest.approx(cheapest(graph, rate), rel=1e-6)
    assert solution.gap <= 1e-3


def cheapest(graph: TrainingGraph, rate: float) -> float:
    """The price of the best of all combinations of ways."""
    found = choices(graph, 2)
    nodes = list(found.ways)
    assert len([n for n in nodes if n.op == "call_function"]) <= 8
    best = inf
    for chosen in product(*(found.ways[node] for node in nodes)):
        best = min(best, cost(graph, dict(zip(nodes, chosen, strict=True)), found.reads, rate))
    return best


def cost(graph: TrainingGraph, ways: dict, reads: dict, rate: float) -> float:  # type: ignore
    needs = {
        (value, ways[node].operands[place])
        for node, values in reads.items()
        for place, value in enumerate(values)
    }
    inputs = dict(zip(graph.inputs, graph.placeholders, strict=True))
    for role, node in zip(graph.outputs, graph.results, strict=True):
        if node is not None:
            is_gradient = isinstance(role, Gradient) and isinstance(role.of, Parameter)
            wanted = ways[inputs[role.of]].results[0] if is_gradient else Replicate()
            needs.add((value_of(node), wanted))
    total = sum(work(rate, 2)(node, ways[node]) for node in reads)
    for value, after in needs:
        before = ways[value.node].results[value.place]
        if steps(before, after) is None:
            return inf
        if before != after:
            total += price(2)(value, before, after)
    return total


# -- on a transformer --------------------------------------------------------------------------

WIDTH, HEADS, ROWS, LENGTH = 64, 4, 2, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, width // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Stack(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_size_does_not_grow_with_depth() -> None:
    counts = []
    for depth in (3, 6):
        graph = World(Stack(depth), ((torch.rand(ROWS, LENGTH, WIDTH),), {}), 1).graph(0)
        found = choices(graph, 2)
        counts.append(len(set(found.same.values()) & set(found.ways)))
    assert counts[1] - counts[0] <= 3 * 2  # sums of gradients that belong to no block
