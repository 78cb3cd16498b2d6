from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from autopar.core.ir.roles import (
    Accumulated,
    Gradient,
    InputRole,
    Output,
    OutputRole,
    Parameter,
    Saved,
    Tangent,
    Update,
)
from autopar.passes.pipeline import build_pass_pipeline
from autopar.passes.split_forward_backward import Split, split_forward_backward
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.passes.golden import text, two_layers
from tests.passes.parity import World
from tests.passes.simulated import Results, run_ranks


def test_backward_takes_what_the_forward_saves() -> None:
    split = split_forward_backward(two_layers().graph(0))
    assert split.backward is not None
    assert_expected_inline(
        text(split.forward),
        """\
blocks.0.weight: [3,4] R
blocks.1.weight: [2,3] R
in0: [2,4] V
t: [4,3] R = t(blocks.0.weight)
mm: [2,3] V = mm(in0, t)
tanh: [2,3] V = tanh(mm)
t_1: [3,2] R = t(blocks.1.weight)
mm_1: [2,2] V = mm(tanh, t_1)
pow_1: [2,2] V = pow(mm_1, 2)
mean_default: [] V = mean(pow_1)
div_scalar: [] P(sum) = div(mean_default, 2.0)
start_all_reduce: [] R = start_all_reduce([div_scalar], batch)
wait: [] R = wait(start_all_reduce)
getitem: [] R = getitem(wait, 0)""",
    )
    assert_expected_inline(
        text(split.backward),
        """\
saved mm_1: [2,2] V
saved tanh: [2,3] V
saved t_1: [3,2] R
saved primals_3: [2,4] V
tangent0: [] R
expand: [2,2] V = expand(tangent0, [2, 2])
div: [2,2] V = div(expand, 8)
pow_2: [2,2] V = pow(saved mm_1, 1.0)
mul: [2,2] V = mul(pow_2, 2.0)
mul_1: [2,2] V = mul(div, mul)
t_2: [2,2] V = t(mul_1)
mm_2: [2,3] P(sum) = mm(t_2, saved tanh)
t_3: [3,2] P(sum) = t(mm_2)
t_4: [2,3] R = t(saved t_1)
mm_3: [2,3] V = mm(mul_1, t_4)
t_5: [2,3] P(sum) = t(t_3)
tanh_backward: [2,3] V = tanh_backward(mm_3, saved tanh)
t_6: [3,2] V = t(tanh_backward)
mm_4: [3,4] P(sum) = mm(t_6, saved primals_3)
t_7: [4,3] P(sum) = t(mm_4)
t_8: [3,4] P(sum) = t(t_7)""",
    )
    assert split.forward.outputs[1:] == split.backward.inputs[:-1]


def kinds(roles: tuple[InputRole, ...] | tuple[OutputRole, ...]) -> set[type]:
    return {type(role) for role in roles}


def halves(it: World, stage: int) -> list[Split]:
    plan = it.plan(stage, "selective")
    return [
        split_forward_backward(g)
        for g in it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))
    ]


def run_halves(it: World, stage: int) -> list[Results]:
    """Runs all forwards, then all backwards on nothing but what was saved and the tangents."""
    splits = halves(it, stage)
    early = it.run([split.forward for split in splits])
    backwards = [split.backward for split in splits if split.backward is not None]
    given = []
    for rank, backward in enumerate(backwards):
        values = {role: early[rank][role] for role in backward.inputs if isinstance(role, Saved)}
        given.append(it.values(backward, rank) | values)  # type: ignore[operator]
    late = run_ranks(backwards, given)  # type: ignore[arg-type]
    return [
        {r: t for r, t in (a | b).items() if not isinstance(r, Saved)}
        for a, b in zip(early, late, strict=True)
    ]


@pytest.mark.parametrize("name", ["conv", "odd"])
@pytest.mark.parametrize("stage", [0, 3])
def test_the_halves_compute_what_the_joint_graph_does(name: str, stage: int) -> None:
    case = MODELS[name]
    it = World(case.make().double(), to_dtype(case.batch(6, 0), torch.float64), 2, case.loss)
    plan = it.plan(stage, "selective")
    joint = it.run(it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo")))
    for got, want in zip(run_halves(it, stage), joint, strict=True):
        assert got.keys() == want.keys()
        for role, tensor in want.items():
            other = got[role]
            assert (other is None) == (tensor is None)
            assert tensor is None or other.equal(tensor), role  # type: ignore[union-attr]


def test_roles_of_the_halves() -> None:
    case = MODELS["conv"]
    it = World(case.make(), case.batch(4, 0), 2)
    split = halves(it, 3)[0]
    assert split.backward is not None
    assert kinds(split.forward.outputs) == {Output, Update, Saved}
    assert kinds(split.backward.inputs) == {Saved, Tangent}
    assert kinds(split.backward.outputs) == {Gradient}


def test_held_gradients_enter_the_backward_alone() -> None:
    it = two_layers()
    plan = it.plan(0)
    name = "blocks.0.weight"
    (graph, _) = it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo", held=(name,)))
    split = split_forward_backward(graph)
    assert split.backward is not None
    assert Accumulated(name) in split.backward.inputs
    assert Accumulated(name) not in split.forward.inputs


def test_a_parameter_is_saved_not_asked_for_again() -> None:
    """What the optimizer does between forward and backward must not be seen halfway."""
    split = split_forward_backward(two_layers().graph(0))
    assert split.backward is not None
    assert not any(isinstance(role, Parameter) for role in split.backward.inputs)


def test_without_a_backward_there_is_one_half() -> None:
    graph = replace(two_layers(), differentiate=False).graph(0)
    assert split_forward_backward(graph) == Split(graph, None)
