"""Ring attention in plans: where it is chosen, at the prices of the shipped H100 node."""

from dataclasses import replace

import pytest
import torch

import autopar
from autopar._torch import OpOverload
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import OpStrategy
from autopar.core.operators.attention import attention, attention_backward
from autopar.core.operators.attention_blocks import BLOCKS
from autopar.core.plan.strategy import RING_DECLINED
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.passes.rules.loops import Operator, split_loop
from autopar.passes.rules.lowerings.registry import program
from autopar.passes.rules.lowerings.ring_attention import RING, ring_loops
from autopar.planner.placement.costs import PlacementCosts
from autopar.planner.placement.solve import partition
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.harness.training import fixed
from tests.planner.blocks import GPTBlock, Stack, captured
from tests.planner.test_known_best import machine

WHOLE = {"*": autopar.Replicate()}


def block(heads: int, length: int, *, causal: bool = True) -> TrainingGraph:
    """One block of a GPT on one row."""
    width = 128 * heads
    with torch.device("meta"):
        return captured(Stack(lambda: GPTBlock(width, heads, causal), 1), (1, length, width))


def chosen(
    graph: TrainingGraph, ranks: int, ring: bool | None, memory: int | None = None
) -> tuple[float, list[OpStrategy]]:
    """Seconds of a partition along cp, and the strategies of attention and its backward."""
    options = {"axis": "cp", "pins": WHOLE, "ring": ring, "memory": memory}
    found = partition(graph, ranks, machine(), **options)  # type: ignore[arg-type]
    own = [s for n, s in found.op_strategies.items() if n.target in TARGETS]
    return found.seconds, own


TARGETS = (attention, attention_backward)


def test_a_ring_divides_what_heads_do_not() -> None:
    graph = block(3, 65536)
    (seconds, own), (others, plain) = (chosen(graph, 4, ring) for ring in (None, False))
    assert [each.lowering for each in own] == [RING, RING]
    assert [each.lowering for each in plain] == ["", ""]
    assert seconds < 0.5 * others  # else every rank computes all of attention


def test_an_all_to_all_of_heads_is_cheaper_than_a_ring() -> None:
    graph = block(8, 8192)
    (seconds, own), (others, plain), (forced, rings) = (
        chosen(graph, 4, ring) for ring in (None, False, True)
    )
    assert seconds == pytest.approx(others)
    assert own == plain
    assert {each.lowering for each in rings} == {RING}
    assert forced > seconds


def test_a_ring_is_taken_where_memory_is_short() -> None:
    """Gathered keys and values stay for the backward, and a ring's do not."""
    graph = block(3, 8192, causal=False)
    _, quick = chosen(graph, 4, None)
    _, small = chosen(graph, 4, None, memory=1)  # which nothing fits: the fewest bytes count
    assert {each.lowering for each in quick} == {""}
    assert {each.lowering for each in small} == {RING}


def test_calls_without_a_ring_go_as_before() -> None:
    """The 2047 rows of a rank are not two equal chunks."""
    _, own = chosen(block(4, 8188), 4, True)
    assert {each.lowering for each in own} == {""}


@pytest.mark.parametrize(
    ("length", "causal", "why"),
    [(28, True, "two equal chunks"), (5, False, "none"), (32, True, ""), (30, True, "")],
)
def test_a_ring_that_declines_is_told(length: int, causal: bool, why: str) -> None:
    with torch.device("meta"):
        model = Stack(lambda: GPTBlock(32, 4, causal), 1)
        x = torch.randn(1, length, 32)
    strategy = fixed(cp=4, ring_attention=True)
    plan = autopar.plan(model, 4, example_inputs=(x,), strategy=strategy)
    told = [note for note in plan.notes if note.startswith(RING_DECLINED)]
    assert bool(told) == bool(why)
    assert all(why in note for note in told)


@pytest.mark.parametrize("ring", [None, True, False])
def test_bytes_alone_choose_a_ring_only_if_asked(ring: bool | None) -> None:
    graph = block(3, 24)
    found = partition_by_bytes(graph, 2, WHOLE, ring=ring)
    attentions = {n.name for n in graph.calls() if n.target in TARGETS}
    lowered = {name for name, own in found if own.lowering == RING}
    assert lowered == (attentions if ring else set())


@pytest.mark.parametrize("slower", [1e-3, 1e3])
def test_messages_hide_behind_blocks(slower: float) -> None:
    """A ring of n ranks takes a block, then n - 1 times a block or a message."""
    node = next(n for n in block(4, 8192, causal=False).calls() if n.target is attention)
    op_strategy = replace(split_loop(*ring_loops(Operator.of(node))), lowering=RING)
    cluster, ranks = Cluster.named("dgx-h100"), 4
    operators = OperatorTimes.load(cluster.device)
    link = cluster.default(8, "cuda").link
    assert link is not None
    rate = link.bytes_per_s / slower
    link = replace(link, bytes_per_s=rate)
    cluster = replace(cluster, curves={}, topology=None, link=link, backend="gloo")
    prices = PlacementCosts(GroupShape(ranks, ranks), cluster, operators)
    shard = 2 * node.args[1].meta["val"].numel() * 4 // ranks  # type: ignore[union-attr]
    message = prices.sent("permute", shard, torch.float32).seconds
    part = operators.seconds(node).seconds / ranks**2
    bound = part + (ranks - 1) * max(part, message)
    seconds = prices.operator(node, op_strategy).seconds
    run = program(Operator.of(node), op_strategy, ranks, 0).nodes
    merged = [n for n in run if isinstance(n.target, OpOverload) and n.target not in BLOCKS]
    assert bound <= seconds <= bound + sum(operators.seconds(n).seconds for n in merged)
