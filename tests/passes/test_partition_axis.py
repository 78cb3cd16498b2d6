"""A partitioned graph computes on every rank what the whole one does."""

from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autopar.capture import Call, TensorSpec, capture
from autopar.graph import (
    Buffer,
    Input,
    InputRole,
    OutputRole,
    Parameter,
    Tangent,
    TrainingGraph,
)
from autopar.partition import Ways
from autopar.passes.partition_axis import PartitionAxis
from autopar.passes.rules.lockstep import run
from autopar.passes.rules.loops import Way
from autopar.passes.rules.oracle import cut, equal, joined
from autopar.passes.runner import run_passes
from autopar.placement import Partial, Replicate, Shard
from autopar.planner.partitions import partition_by_bytes
from autopar.runtime.parameters import describe_parameters
from tests.models import MODELS, to_dtype
from tests.passes.golden import changes, two_layers

AXIS = "tp"
WHOLE = Replicate()
Values = dict[InputRole, Tensor]


def captured(name: str, ranks: int, rows: int) -> tuple[TrainingGraph, Values]:
    """The graph of a model at some rows, and what it is given."""
    case = MODELS[name]
    model = case.make().double()
    leaves, structure = pytree.tree_flatten(to_dtype(case.batch(rows, 0), torch.float64))
    specs = tuple(TensorSpec.of(x) if isinstance(x, Tensor) else x for x in leaves)
    call = Call(specs, structure, tuple(isinstance(x, Tensor) and x.dim() > 0 for x in leaves))
    parameters = describe_parameters(model)
    graph = capture(model, call, parameters, device=torch.device("cpu")).graph
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values: Values = {}
    for role, node in zip(graph.inputs, graph.placeholders, strict=True):
        match role:
            case Parameter(n) | Buffer(n):
                values[role] = state[n].detach()
            case Input(index):
                values[role] = leaves[index]
            case Tangent():
                values[role] = torch.ones(node.meta["val"].shape, dtype=torch.float64)
    return replace(graph, axes={AXIS: ranks}), values


def partitioned(
    graph: TrainingGraph, ranks: int, ways: Ways, values: Values
) -> dict[OutputRole, Tensor | None]:
    """What all ranks return together; None where they should agree and do not."""
    graphs = [run_passes(graph, [PartitionAxis(AXIS, r, ways)]) for r in range(ranks)]
    lies = {n.name: r for n, r in zip(graph.placeholders, graph.inputs, strict=True)}
    placed = {lies[name]: way.results[0] for name, way in ways if name in lies}
    parts = [cut(values[role], placed.get(role, WHOLE), ranks) for role in graph.inputs]
    found = run([_module(g) for g in graphs], list(zip(*parts, strict=True)))
    return {
        role: joined(results, placed.get(getattr(role, "of", None), WHOLE))  # type: ignore[call-overload]
        for role, results in zip(graph.outputs, zip(*found, strict=True), strict=True)
        if results[0] is not None
    }


def whole(graph: TrainingGraph, values: Values) -> dict[OutputRole, Tensor]:
    """What one device returns."""
    (found,) = run([_module(graph)], [[values[role] for role in graph.inputs]])
    return dict(zip(graph.outputs, found, strict=True))


def _module(graph: TrainingGraph) -> fx.GraphModule:
    return fx.GraphModule(dict(graph.constants), graph.graph)


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
def test_ranks_compute_what_one_device_does(name: str, ranks: int, rows: int) -> None:
    graph, values = captured(name, ranks, rows)
    want = whole(graph, values)
    ways = partition_by_bytes(graph, ranks)
    assert any(isinstance(p, Shard) for _, way in ways for p in way.results)
    for role, made in partitioned(graph, ranks, ways, values).items():
        assert made is not None, f"ranks disagree about {role}"
        assert equal(made, want[role]), role


def column_and_row(graph: TrainingGraph) -> Ways:
    """Megatron's split of two linear layers: the first by its columns, the second by its rows."""
    s0, s1, whole, part = Shard(0), Shard(1), Replicate(), Partial()
    chosen: dict[str, Way] = {
        "primals_1": Way((), (s0,)),
        "primals_2": Way((), (s1,)),
        "t": Way((s0,), (s1,)),
        "mm": Way((whole, s1), (s1,)),
        "tanh": Way((s1,), (s1,)),
        "t_1": Way((s1,), (s0,)),
        "mm_1": Way((s1, s0), (part,)),
        "mm_2": Way((whole, s1), (s1,)),
        "t_3": Way((s1,), (s0,)),
        "t_4": Way((s0,), (s1,)),
        "mm_3": Way((whole, s1), (s1,)),
        "t_5": Way((s0,), (s1,)),
        "tanh_backward": Way((s1, s1), (s1,)),
        "t_6": Way((s1,), (s0,)),
        "mm_4": Way((s0, whole), (s0,)),
        "t_7": Way((s0,), (s1,)),
        "t_8": Way((s1,), (s0,)),
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
