from dataclasses import replace

import torch
from expecttest import assert_expected_inline

from autopar.ir.roles import Accumulated, Gradient, Parameter, UnreducedGrad
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from tests.harness.reference import relative_error
from tests.passes.golden import changes, two_layers
from tests.passes.parity import AXIS, EXACT, World

NAMES = ("blocks.0.weight", "blocks.1.weight")


def before(rank: int, stage: int = 0) -> tuple[Pass, ...]:
    stages = (("", 0), ("blocks.0", stage), ("blocks.1", 0))
    return (AssignBatchAxis(AXIS), ShardParameters(AXIS, rank, stages))


def test_whole_parameters_are_reduced_and_sharded_ones_scattered() -> None:
    graph = run_passes(two_layers().graph(1), before(1, stage=2))
    after = run_passes(graph, [SynchronizeGradients(AXIS, 1)])
    assert_expected_inline(
        changes(graph, after),
        """\
+ start_all_reduce_1: [2,3] R = start_all_reduce([t_5], dp)
+ wait_3: [2,3] R = wait(start_all_reduce_1)
+ getitem_3: [2,3] R = getitem(wait_3, 0)
+ start_reduce_scatter: [1,4] S(0) = start_reduce_scatter([t_8], [1], dp)
+ wait_2: [1,4] S(0) = wait(start_reduce_scatter)
+ getitem_2: [1,4] S(0) = getitem(wait_2, 0)
-> gradient blocks.0.weight = getitem_2
-> gradient blocks.1.weight = getitem_3""",
    )


def test_unreduced_gradients_are_returned() -> None:
    graph = run_passes(two_layers().graph(0), before(0))
    after = run_passes(graph, [SynchronizeGradients(AXIS, 0, unreduced=NAMES)])
    assert_expected_inline(
        changes(graph, after),
        """\
-> unreducedgrad blocks.0.weight = t_8
-> unreducedgrad blocks.1.weight = t_5""",
    )


def test_accumulated_gradients_are_added_before_the_reduction() -> None:
    graph = run_passes(two_layers().graph(0), before(0))
    after = run_passes(graph, [SynchronizeGradients(AXIS, 0, accumulated=NAMES[:1])])
    assert_expected_inline(
        changes(graph, after),
        """\
+ accumulated blocks.0.weight: [3,4] P(sum)
+ start_all_reduce_2: [2,3] R = start_all_reduce([t_5], dp)
+ wait_2: [2,3] R = wait(start_all_reduce_2)
+ getitem_2: [2,3] R = getitem(wait_2, 0)
+ add_tensor: [3,4] P(sum) = add(accumulated blocks.0.weight, t_8)
+ start_all_reduce_1: [3,4] R = start_all_reduce([add_tensor], dp)
+ wait_1: [3,4] R = wait(start_all_reduce_1)
+ getitem_1: [3,4] R = getitem(wait_1, 0)
-> gradient blocks.0.weight = getitem_1
-> gradient blocks.1.weight = getitem_2""",
    )


def test_accumulation_reduces_once() -> None:
    """Two calls without reduction and one with: three times the gradient."""
    it: World = two_layers(ranks=3, rows=7)
    held = it.run(
        it.lower(lambda rank: (*before(rank, 3), SynchronizeGradients(AXIS, rank, unreduced=NAMES)))
    )
    graphs = it.lower(
        lambda rank: (*before(rank, 3), SynchronizeGradients(AXIS, rank, accumulated=NAMES))
    )
    inputs = []
    for rank, graph in enumerate(graphs):
        kept = {Accumulated(name): 2 * held[rank][UnreducedGrad(name)] for name in NAMES}  # type: ignore
        inputs.append({**it.values(graph, rank), **kept})
    results = it.run(graphs, inputs)
    for name, gradient in it.plain().gradients.items():
        parts = [result[Gradient(Parameter(name))] for result in results]
        got = torch.cat(parts) if name in graphs[0].layouts else parts[0]  # type: ignore[arg-type]
        assert relative_error(got, 3 * gradient) < EXACT  # type: ignore[arg-type]


def test_accumulated_gradient_of_a_parameter_without_a_gradient() -> None:
    it = two_layers()
    it.model.blocks[0].requires_grad_(False)
    graph = run_passes(it.graph(0), [*before(0), SynchronizeGradients(AXIS, 0, accumulated=NAMES)])
    assert graph.result(Gradient(Parameter(NAMES[0]))) is not None


def test_says_why_it_declined() -> None:
    graph = replace(two_layers(), differentiate=False).graph(0)
    assert SynchronizeGradients(AXIS, 0)(graph).reason == "no parameter has a gradient"
