"""A stage starts its gathers before its input has come, and sends before its reductions end."""

from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Gradient, Parameter, Saved
from autopar.passes.core.collective_ops import WAIT_LOWERED, is_lowered_start
from autopar.passes.pipeline_parallel.split_messages import split_gathers, split_reductions
from autopar.passes.split_forward_backward import Split, split_forward_backward
from autopar.passes.stage_lowering import export_gathered
from tests.passes.golden import two_layers
from tests.passes.test_stage_lowering import NAMES, lowered


def halves(zero: dict[str, int]) -> Split:
    return split_forward_backward(export_gathered(lowered(0, zero, two_layers()), zero))


def counts(graph: TrainingGraph) -> tuple[int, int]:
    """The collectives that a graph starts and those that it awaits."""
    waits = sum(node.target is WAIT_LOWERED for node in graph.calls())
    return sum(map(is_lowered_start, graph.calls())), waits


def computed(graph: TrainingGraph) -> list[str]:
    return [node.name for node in graph.calls()]


def test_gathers_start_from_parameters_alone() -> None:
    forward = halves({"": 0, "blocks.0": 1, "blocks.1": 2}).forward
    ahead, rest = split_gathers(forward)
    assert ahead is not None
    assert {role.name for role in ahead.inputs if isinstance(role, Parameter)} == {*NAMES}
    assert all(isinstance(role, Parameter) for role in ahead.inputs)
    gathers = counts(ahead)[0]
    assert gathers > 0
    assert counts(ahead)[1] == 0
    assert counts(rest) == (counts(forward)[0] - gathers, counts(forward)[1])
    assert {*ahead.outputs} == {role for role in rest.inputs if isinstance(role, Saved)}
    assert rest.outputs == forward.outputs
    assert sorted(computed(ahead) + computed(rest)) == sorted(computed(forward))


def test_what_each_micro_batch_gathers_stays() -> None:
    forward = halves({"": 0, "blocks.0": 3, "blocks.1": 3}).forward
    assert split_gathers(forward) == (None, forward)


def test_reductions_are_awaited_behind_all_else() -> None:
    backward = halves({"": 0, "blocks.0": 1, "blocks.1": 2}).backward
    assert backward is not None
    first, finish = split_reductions(backward)
    assert finish is not None
    assert (counts(first)[0], counts(finish)[0]) == (counts(backward)[0], 0)
    assert counts(first)[1] + counts(finish)[1] == counts(backward)[1]
    late = {*map(Gradient, map(Parameter, NAMES))} & {*finish.outputs}
    assert late
    assert {*first.outputs} & {*backward.outputs} | {*finish.outputs} == {*backward.outputs}
    assert sorted(computed(first) + computed(finish)) == sorted(computed(backward))


def test_a_backward_without_reductions_is_whole() -> None:
    backward = split_forward_backward(two_layers().graph(0)).backward
    assert backward is not None
    assert split_reductions(backward) == (backward, None)
