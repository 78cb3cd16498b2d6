from dataclasses import replace

import torch
from expecttest import assert_expected_inline

from autopar.core.ir.roles import Accumulated, Gradient, Parameter, UnreducedGrad
from autopar.passes.core.collective_ops import message_bytes, starts, tagged
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from tests.harness.reference import relative_error
from tests.passes.golden import TwoLayers, changes, two_layers
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


def under_autocast() -> World:
    """TwoLayers with gradients that are bf16 before their last cast."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    it = World(TwoLayers(), ((x,), {}), 2)
    with torch.autocast("cpu", torch.bfloat16):
        it.graph(0), it.graph(1)
    return it


def test_reductions_in_bf16_come_before_the_cast() -> None:
    graph = run_passes(under_autocast().graph(0), before(0, stage=2))
    after = run_passes(graph, [SynchronizeGradients(AXIS, 0, dtype="bfloat16")])
    assert_expected_inline(
        changes(graph, after),
        """\
+ start_all_reduce_1: [2,3] R = start_all_reduce([t_5], dp)
+ wait_3: [2,3] R = wait(start_all_reduce_1)
+ getitem_3: [2,3] R = getitem(wait_3, 0)
+ _to_copy_default_3: [2,3] R = _to_copy(getitem_3, dtype=torch.float32)
+ start_reduce_scatter: [2,4] S(0) = start_reduce_scatter([t_8], [2], dp)
+ wait_2: [2,4] S(0) = wait(start_reduce_scatter)
+ getitem_2: [2,4] S(0) = getitem(wait_2, 0)
+ _to_copy_default_2: [2,4] S(0) = _to_copy(getitem_2, dtype=torch.float32)
- _to_copy_3: [2,3] P(sum) = _to_copy(t_5, dtype=torch.float32, layout=torch.strided, device=cpu)
- _to_copy_4: [3,4] P(sum) = _to_copy(t_8, dtype=torch.float32, layout=torch.strided, device=cpu)
-> gradient blocks.0.weight = _to_copy_default_2
-> gradient blocks.1.weight = _to_copy_default_3""",
    )
    assert [str(note) for note in after.notes] == [
        "gradients are reduced in bfloat16: parts and sums are rounded, unlike on one device"
    ]


def test_bf16_halves_the_bytes_and_float32_is_the_default() -> None:
    it = under_autocast()

    def sent(dtype: str) -> list[int]:
        passes = [*before(0, 2), SynchronizeGradients(AXIS, 0, dtype=dtype)]
        graph = run_passes(it.graph(0), passes)
        return [message_bytes(s) for s in starts(graph) if tagged(s, "gradient")]

    assert [2 * n for n in sent("bfloat16")] == sent("")
    wide, narrow = (
        it.run(it.lower(lambda r, d=d: (*before(r), SynchronizeGradients(AXIS, r, dtype=d))))[0]
        for d in ("", "bfloat16")
    )
    for name in NAMES:
        role = Gradient(Parameter(name))
        ours, theirs = narrow[role], wide[role]
        assert ours is not None
        assert theirs is not None
        assert ours.dtype == theirs.dtype == torch.float32
        assert torch.equal(ours, theirs.bfloat16().float())  # two parts: one rounding
