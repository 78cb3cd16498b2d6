"""Ring attention of all ranks in one process, beside attention of one device."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.core.ir.graph import tensor_bytes
from autopar.core.ir.placement import OpStrategy
from autopar.core.operators.attention import attention, attention_backward
from autopar.passes.core.collective_ops import message_bytes, start_permute
from autopar.passes.rules.loops import Operator, feasible_loops, split_loop
from autopar.passes.rules.lowerings.registry import lowering_loops, program
from autopar.passes.rules.lowerings.ring_attention import RING
from autopar.passes.rules.proof.oracle import run_on_shards, run_operator, unshard

EXACT = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def draw(
    rows: int, keys: int, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype
) -> list[Tensor]:
    """Queries, keys, values and a gradient."""
    gen = torch.Generator().manual_seed(rows + keys)
    shapes = [
        (2, heads[0], rows, widths[0]),
        (2, heads[1], keys, widths[0]),
        (2, heads[1], keys, widths[1]),
        (2, heads[0], rows, widths[1]),
    ]
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def both(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *call: Any) -> list[Operator]:
    """Attention and its backward, with the results of one device."""
    operator = Operator(attention, (q, k, v, None, *call), {}, ())
    results = run_operator(operator)
    args = (grad, q, k, v, None, *results, False, *call)
    backward = Operator(attention_backward, args, {}, ())
    return [
        Operator(attention, operator.args, {}, results),
        Operator(attention_backward, args, {}, run_operator(backward)),
    ]


def ring(operator: Operator, ranks: int) -> OpStrategy | None:
    """The strategy of a ring, if there is one."""
    loops = (loop for loop in lowering_loops(operator, (RING,)) if loop.lowering == RING)
    return next((split_loop(w) for loop in loops for w in feasible_loops(loop, ranks, (1,))), None)


def difference(operator: Operator, ranks: int) -> float:
    """The greatest relative difference of a ring's results from those of one device."""
    op_strategy = ring(operator, ranks)
    assert op_strategy is not None
    parts = zip(*run_on_shards(operator, op_strategy, ranks), strict=True)
    worst = 0.0
    for placement, want, own in zip(op_strategy.results, operator.results, parts, strict=True):
        got = unshard(own, placement)
        assert got is not None
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        if want.numel():
            worst = max(worst, float((got - want).double().norm() / want.double().norm()))
    return worst


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "widths", "call"),
    [
        (24, 24, (2, 2), (8, 8), (0.0, False)),
        (24, 24, (2, 2), (8, 8), (0.0, True)),
        (24, 24, (4, 2), (8, 8), (0.0, True)),
        (24, 24, (4, 1), (8, 8), (0.0, False, 0.3)),
        (24, 48, (2, 2), (8, 8), (0.0, False)),
        (24, 24, (3, 3), (8, 5), (0.0, True, 0.7)),
    ],
)
def test_a_ring_is_exact(
    rows: int,
    keys: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    call: Any,
    ranks: int,
    dtype: torch.dtype,
) -> None:
    for operator in both(*draw(rows, keys, heads, widths, dtype), *call):
        assert difference(operator, ranks) <= EXACT[dtype]


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_a_ring_of_uneven_rows_is_exact(seed: int, dtype: torch.dtype) -> None:
    drawn = random.Random(seed)
    ranks, is_causal = drawn.choice([2, 3, 4, 5]), drawn.random() < 0.6
    most = 2 * drawn.randint(1, 5) if is_causal else drawn.randint(2, 9)
    rows = ranks * most - drawn.randint(1, min(ranks, most) - 1)
    heads = drawn.choice([(2, 2), (4, 2), (3, 1)])
    call = (0.0, is_causal, drawn.choice([None, 0.4]))
    for operator in both(*draw(rows, rows, heads, (8, drawn.choice([8, 5])), dtype), *call):
        assert difference(operator, ranks) <= EXACT[dtype]


@pytest.mark.parametrize("rows", [22, 24])
@pytest.mark.parametrize("is_causal", [False, True])
def test_programs_of_ranks_differ_in_numbers_only(is_causal: bool, rows: int) -> None:
    """Passes that reorder operators by their operands then order messages alike on all ranks."""
    for operator in both(*draw(rows, rows, (2, 2), (8, 8), torch.float64), 0.0, is_causal):
        op_strategy = ring(operator, 3)
        assert op_strategy is not None
        programs = {
            tuple((n.target, *(m.name for m in n.all_input_nodes)) for n in graph.nodes)
            for graph in (program(operator, op_strategy, 3, rank) for rank in range(3))
        }
        assert len(programs) == 1


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_two_shards_of_keys_and_values_are_there_at_once(ranks: int) -> None:
    """Keys and values that arrive are passed on and freed: memory does not grow with ranks."""
    forward, _ = both(*draw(24, 24, (2, 2), (8, 8), torch.float64), 0.0, False)
    op_strategy = ring(forward, ranks)
    assert op_strategy is not None
    graph = program(forward, op_strategy, ranks, 1)
    at = {node: place for place, node in enumerate(graph.nodes)}
    spans = []  # from where a message is sent, which allocates what arrives, to its last reader
    for start in (node for node in at if node.target is start_permute):
        (item,) = (item for done in start.users for item in done.users)
        readers = {reader for view in item.users for reader in (view, *view.users)}
        spans.append((at[start], max(map(at.__getitem__, readers))))
    assert len(spans) == ranks - 1
    assert {message_bytes(n) for n in at if n.target is start_permute} == {
        2 * tensor_bytes(forward.args[1]) // ranks
    }
    most = max(sum(first <= place <= last for first, last in spans) for place in at.values())
    assert most <= 2


@pytest.mark.parametrize(
    ("rows", "keys", "call"),
    [
        (24, 24, (0.1, False)),  # dropout
        (24, 36, (0.0, True)),  # causal, of other lengths
        (20, 20, (0.0, True)),  # causal, not of two chunks for each rank
        (25, 50, (0.0, False)),  # uneven, of other lengths
    ],
)
def test_other_calls_have_no_ring(rows: int, keys: int, call: Any) -> None:
    for operator in both(*draw(rows, keys, (2, 2), (8, 8), torch.float64), *call):
        assert ring(operator, 3) is None


def test_masks_have_no_ring() -> None:
    q, k, v, _ = draw(24, 24, (2, 2), (8, 8), torch.float64)
    args = (q, k, v, torch.ones(24, 24, dtype=torch.bool))
    assert (
        ring(Operator(attention, args, {}, run_operator(Operator(attention, args, {}, ()))), 3)
        is None
    )
