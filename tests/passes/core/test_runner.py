"""The runner records and checks every pass."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import fx

from autopar.core.ir.graph import GraphProperty, TrainingGraph
from autopar.core.ir.roles import Output
from autopar.errors import PassError
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.core.collective_ops import collective, start_all_reduce, starts, wait_of
from autopar.passes.core.node_builder import call
from autopar.passes.core.pass_base import Pass, PassResult, describe, pass_name
from autopar.passes.core.runner import run_passes
from autopar.passes.core.verifier import check
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.pipeline import build_pass_pipeline
from tests.passes.golden import two_layers
from tests.passes.parity import AXIS

aten = torch.ops.aten
STAGE_0 = (("blocks.0", 0), ("blocks.1", 0))


@dataclass(frozen=True)
class Change(Pass):
    """A pass that does whatever a test wants."""

    does: Callable[[TrainingGraph], object]

    def __call__(self, graph: TrainingGraph) -> PassResult:
        graph = graph.copy()
        changed = self.does(graph)
        return PassResult(changed if isinstance(changed, TrainingGraph) else graph)


def node(graph: TrainingGraph, name: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.name == name)


def statistics() -> TrainingGraph:
    return run_passes(two_layers().graph(0), [AssignBatchAxis(AXIS)])


def fails(graph: TrainingGraph, does: Callable[[TrainingGraph], object]) -> str:
    with pytest.raises(PassError) as error:
        run_passes(graph, [Change(does)])
    return str(error.value)


# -- the record --------------------------------------------------------------------------------


def test_history_names_every_pass_with_its_options_and_why_it_declined() -> None:
    passes = [
        AssignBatchAxis(AXIS),
        ShardParameters(AXIS, 1, (("blocks.0", 0), ("blocks.1", 0))),
    ]
    graph = run_passes(two_layers().graph(0), passes)
    assert graph.history == (
        "captured from TwoLayers",
        "partition_batch(slices=BatchSlices(count=2, index=0, rows=4, over_time=False, held=()), "
        "row_dims=(0,), whole_outputs=(), gathers_rows=False, proves_rows=False, "
        "output_dims=None)",
        "assign_batch_axis(axis='dp')",
        "shard_parameters(axis='dp', rank=1, stages=(('blocks.0', 0), ('blocks.1', 0)), dims=()): "
        "declined, every block is stage 0: parameters stay whole",
    )
    assert str(graph).startswith("# captured from TwoLayers\n# partition_batch(")


def test_passes_print_their_options() -> None:
    item = ShardParameters(AXIS, 1, (("", 3),))
    assert pass_name(item) == "shard_parameters"
    assert describe(item) == "shard_parameters(axis='dp', rank=1, stages=(('', 3),), dims=())"


def test_the_graph_given_is_left_as_it_is() -> None:
    it = two_layers()
    before = str(it.graph(0))
    it.lower(lambda rank: build_pass_pipeline(it.plan(3, "full"), rank, "gloo"))
    assert str(it.graph(0)) == before


def test_observers_see_every_pass() -> None:
    seen = []
    run_passes(
        two_layers().graph(0),
        [AssignBatchAxis(AXIS), SynchronizeGradients(AXIS, 0)],
        lambda name, graph, seconds: seen.append((name, len(graph.history), seconds >= 0)),
    )
    assert seen == [("assign_batch_axis", 3, True), ("synchronize_gradients", 4, True)]


def test_a_failing_pass_is_named_with_those_before_it() -> None:
    def fail(graph: TrainingGraph) -> None:
        raise ZeroDivisionError("on purpose")

    with pytest.raises(PassError, match=r"pass change\(.*\) failed: on purpose") as error:
        run_passes(two_layers().graph(0), [AssignBatchAxis(AXIS), Change(fail)])
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert "passes before it: assign_batch_axis\n" in str(error.value)


def test_a_pass_that_comes_too_early_is_refused() -> None:
    passes = [SynchronizeGradients(AXIS, 0), AssignBatchAxis(AXIS)]
    with pytest.raises(PassError, match="the graph lacks BATCH_SHARDED: put a pass"):
        run_passes(two_layers().graph(0), passes)


def test_a_pass_ensures_its_properties_where_it_declines_too() -> None:
    graph = run_passes(two_layers().graph(0), [ShardParameters(AXIS, 0, STAGE_0)])
    assert graph.history[-1].endswith("declined, every block is stage 0: parameters stay whole")
    assert graph.properties == {GraphProperty.PARAMETERS_SHARDED}


# -- verifier ----------------------------------------------------------------------------------


def claims_to_sum(graph: TrainingGraph) -> TrainingGraph:
    facts = graph.properties | {GraphProperty.GRADIENTS_SYNCHRONIZED}
    return replace(graph, properties=facts)


def test_a_forgotten_sum_shows_the_neighbourhood_and_the_users_line() -> None:
    graph = claims_to_sum(statistics())
    with pytest.raises(PassError) as error:
        check(graph)
    first, *around = str(error.value).splitlines()
    assert first.startswith("t_8 is the gradient of blocks.0.weight, P(sum) instead of R, from ")
    assert "golden.py:" in first
    assert [line[:8].strip() for line in around if "-->" in line] == ["--> t_8:"]
    assert any("mm_4: float64[3, 4] = aten.mm.default(%t_6, %primals_3)" in line for line in around)


def test_a_sum_too_many() -> None:
    """All-reducing what is whole already would count it once a rank."""

    def twice(graph: TrainingGraph) -> None:
        (start,) = [s for s in starts(graph) if s.args[0] == [node(graph, "div_scalar")]]
        done = wait_of(start)
        (result,) = done.users
        graph.graph.inserting_before(graph.backward_start)
        collective(graph.graph, result, start_all_reduce, [result], AXIS)

    assert "is given getitem, which is R" in fails(statistics(), twice)


def test_another_reduction_than_the_operand_waits_for() -> None:
    """Gradients that a pass reduces by their maximum would be wrong on every rank."""

    def largest(graph: TrainingGraph) -> None:
        (start,) = [s for s in starts(graph) if s.args[0] == [node(graph, "div_scalar")]]
        start.args = (*start.args[:2], "max")

    assert "reduces div_scalar by 'max', but it is P(sum)" in fails(statistics(), largest)


def test_a_missing_wait() -> None:
    def forget(graph: TrainingGraph) -> None:
        graph.graph.inserting_before(graph.backward_start)
        call(
            graph.graph,
            node(graph, "mean_default"),
            start_all_reduce,
            [node(graph, "mean_default")],
            AXIS,
        )

    assert "has 0 waits instead of one" in fails(statistics(), forget)


@pytest.mark.parametrize("waits", [0, 2])
def test_a_lowered_collective_is_waited_for_once(waits: int) -> None:
    graph = run_passes(statistics(), [LowerCollectives("nccl", 0)])

    def change(graph: TrainingGraph) -> None:
        issued = node(graph, "all_reduce__default")
        (done,) = issued.users
        if waits:
            graph.graph.inserting_before(graph.backward_start)
            call(graph.graph, issued, done.target, issued)  # type: ignore[arg-type]
        else:
            done.replace_all_uses_with(issued)
            graph.graph.erase_node(done)

    assert "users instead of one wait" in fails(graph, change)


def test_a_returned_value_that_differs_between_ranks() -> None:
    def return_own(graph: TrainingGraph) -> TrainingGraph:
        return graph.with_results({Output(0): node(graph, "mean_default")})

    message = fails(statistics(), return_own)
    assert "mean_default is returned without rows, but differs between ranks" in message


def test_a_returned_part_of_a_sum() -> None:
    def return_part(graph: TrainingGraph) -> TrainingGraph:
        return graph.with_results({Output(0): node(graph, "div_scalar")})

    message = fails(statistics(), return_part)
    assert "div_scalar is returned, but holds only this rank's part of a sum" in message


def test_forward_behind_the_backward() -> None:
    def late(graph: TrainingGraph) -> None:
        graph.graph.inserting_before(graph.output_node)
        call(graph.graph, node(graph, "mm"), aten.tanh.default, node(graph, "mm_4"))

    assert "tanh_default is of the forward, but stands behind" in fails(statistics(), late)


def test_forward_that_uses_the_backward() -> None:
    def cross(graph: TrainingGraph) -> None:
        node(graph, "pow_1").args = (node(graph, "mm_3"), 2)

    assert "used before it has been defined" in fails(statistics(), cross)


def test_a_value_that_nobody_knows() -> None:
    def unknown(graph: TrainingGraph) -> None:
        node(graph, "tanh").meta["val"] = None

    assert "tanh has no value (meta['val'])" in fails(statistics(), unknown)


@pytest.mark.parametrize(("side", "kind"), [("inputs", "input"), ("outputs", "output")])
def test_roles_that_do_not_match(side: str, kind: str) -> None:
    def lose(graph: TrainingGraph) -> TrainingGraph:
        return replace(graph, **{side: getattr(graph, side)[:-1]})

    def repeat(graph: TrainingGraph) -> TrainingGraph:
        roles: tuple[Any, ...] = getattr(graph, side)
        return replace(graph, **{side: (*roles[:-1], roles[0])})

    for change in (lose, repeat):
        message = fails(statistics(), change)
        assert re.search(rf"\d {kind}s have \d distinct roles", message)


def test_a_gradient_of_another_shape() -> None:
    def swap(graph: TrainingGraph) -> TrainingGraph:
        first, second = (r for r in graph.outputs if "Gradient" in str(r))
        return graph.with_results({first: graph.result(second)})

    assert "t_5 has shape [2, 3], not [3, 4]" in fails(statistics(), swap)


def test_a_gradient_of_another_layout() -> None:
    """A sharded parameter whose gradient is reduced whole."""
    sharded = ShardParameters(AXIS, 0, (("blocks.0", 2), ("blocks.1", 0)))
    graph = run_passes(statistics(), [sharded])
    whole = SynchronizeGradients(AXIS, 0)(replace(graph, layouts={})).graph
    with pytest.raises(PassError, match=r"of blocks.0.weight, R instead of S\(0\)"):
        check(claims_to_sum(replace(whole, layouts=graph.layouts)))
