"""Partitioned graphs compute what one device computes."""

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

import autopar
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import OpStrategy, Partial, Replicate, Shard
from autopar.core.plan.partition import NodeStrategies
from autopar.passes.core.runner import run_passes
from autopar.passes.rules.proof.oracle import is_close
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.harness.training import fixed
from tests.passes.golden import changes, two_layers
from tests.passes.partitions import AXIS, Values, captured, partitioned, whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "rows"),
    [  # an odd number of rows, so that something else is split
        ("gpt", 2, 5),
        ("gpt", 3, 6),
        ("encoder", 4, 5),
        ("conv", 2, 5),
        ("encdec", 2, 5),
        ("moe", 4, 5),
        ("odd", 2, 5),
    ],
)
def test_ranks_equal_one_device(name: str, ranks: int, rows: int) -> None:
    graph, values = case_of(name, ranks, rows)
    op_strategies = partition_by_bytes(graph, ranks)
    assert any(
        isinstance(p, Shard) for _, op_strategy in op_strategies for p in op_strategy.results
    )
    check(graph, values, ranks, op_strategies)


def case_of(name: str, ranks: int, rows: int) -> tuple[TrainingGraph, Values]:
    """The graph of a model at a number of rows, and its inputs."""
    case = MODELS[name]
    return captured(case.make().double(), to_dtype(case.batch(rows, 0), torch.float64), ranks)


def check(graph: TrainingGraph, values: Values, ranks: int, op_strategies: NodeStrategies) -> None:
    """Checks that the ranks together return the results of one device."""
    want = whole(graph, values)
    for role, made in partitioned(graph, ranks, op_strategies, values).items():
        assert made is not None, f"ranks disagree about {role}"
        assert is_close(made, want[role]), role


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sizes_that_the_axis_does_not_divide(ranks: int) -> None:
    graph, values = case_of("uneven", ranks, 5)
    pins = {"embedding.weight": Shard(0), "*.up.*": Shard(0), "*.down.weight": Shard(1)}
    op_strategies = partition_by_bytes(graph, ranks, pins)
    check(graph, values, ranks, op_strategies)
    last = run_passes(graph, [PartitionAxis(AXIS, ranks - 1, op_strategies)])
    rest = {n: n - (ranks - 1) * -(-n // ranks) for n in (97, 151)}
    assert last.parameters["embedding.weight"].shape == (rest[97], 30)
    assert last.parameters["blocks.1.down.weight"].shape == (30, rest[151])


def test_heads_that_the_axis_does_not_divide_are_named() -> None:
    case, whole_heads = MODELS["uneven"], {"*.out.weight": Replicate()}
    strategy = fixed(tp=2, placements=whole_heads)
    rows, _ = case.batch(5, 0)
    (note,) = autopar.plan(case.make(), 2, example_inputs=rows, strategy=strategy).notes
    assert note.startswith("blocks.*.out.weight: whole on every rank of tp. Forward views 30 as")
    assert note.endswith("2 ranks cannot share 5 (4 or 6 would do)")


def column_and_row(graph: TrainingGraph) -> NodeStrategies:
    """Megatron's split of two linear layers: the first by its columns, the second by its rows."""
    s0, s1, whole, part = Shard(0), Shard(1), Replicate(), Partial()
    chosen: dict[str, OpStrategy] = {
        "primals_1": OpStrategy((), (s0,)),
        "primals_2": OpStrategy((), (s1,)),
        "t": OpStrategy((s0,), (s1,)),
        "mm": OpStrategy((whole, s1), (s1,)),
        "tanh": OpStrategy((s1,), (s1,)),
        "t_1": OpStrategy((s1,), (s0,)),
        "mm_1": OpStrategy((s1, s0), (part,)),
        "mm_2": OpStrategy((whole, s1), (s1,)),
        "t_3": OpStrategy((s1,), (s0,)),
        "t_4": OpStrategy((s0,), (s1,)),
        "mm_3": OpStrategy((whole, s1), (s1,)),
        "t_5": OpStrategy((s0,), (s1,)),
        "tanh_backward": OpStrategy((s1, s1), (s1,)),
        "t_6": OpStrategy((s1,), (s0,)),
        "mm_4": OpStrategy((s0, whole), (s0,)),
        "t_7": OpStrategy((s0,), (s1,)),
        "t_8": OpStrategy((s1,), (s0,)),
    }
    return tuple(chosen.items())


def test_text() -> None:
    it = two_layers(ranks=1, width=4)
    before = replace(it.graph(0), axes={AXIS: 2})
    after = run_passes(before, [PartitionAxis(AXIS, 1, column_and_row(before))])
    assert_expected_inline(
        changes(before, after),
        """\
~ blocks.0.weight: [2,4]
~ blocks.1.weight: [2,2]
~ t: [4,2] = t(blocks.0.weight)
~ mm: [4,2] = mm(in0, t)
~ tanh: [4,2] = tanh(mm)
~ t_1: [2,2] = t(blocks.1.weight)
+ start_all_reduce: [4,2] = start_all_reduce([mm_1], tp)
+ wait: [4,2] = wait(start_all_reduce)
+ getitem: [4,2] = getitem(wait, 0)
~ pow_1: [4,2] = pow(getitem, 2)
~ pow_2: [4,2] = pow(getitem, 1.0)
~ mm_2: [2,2] = mm(t_2, tanh)
~ t_3: [2,2] = t(mm_2)
~ t_4: [2,2] = t(t_1)
~ mm_3: [4,2] = mm(mul_1, t_4)
~ t_5: [2,2] = t(t_3)
~ tanh_backward: [4,2] = tanh_backward(mm_3, tanh)
~ t_6: [2,4] = t(tanh_backward)
~ mm_4: [2,4] = mm(t_6, in0)
~ t_7: [4,2] = t(mm_4)
~ t_8: [2,4] = t(t_7)""",
    )
    again = run_passes(before, [PartitionAxis(AXIS, 1, ())])
    assert again.history[-1].endswith("declined, everything is whole on every rank")
