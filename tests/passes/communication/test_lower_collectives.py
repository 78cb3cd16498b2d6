"""Lowered collectives: their text, and, over random buckets, what they compute."""

import operator
from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from autopar._torch import FakeTensorMode
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.placement import Replicate, Shard, chunk_rows
from autopar.core.ir.roles import Input, Output
from autopar.passes.communication.lower_collectives import LowerCollectives
from autopar.passes.core.collective_ops import (
    collective,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_permute,
    start_reduce_scatter,
    starts,
)
from tests.passes.golden import text, two_layers
from tests.passes.simulated import Results, c10d, chunks, run_ranks

AXIS = "dp"
CUT = (start_reduce_scatter, start_all_to_all, start_permute)
Shapes = Sequence[tuple[int, ...]]

shapes = st.lists(
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
)
ranks = st.integers(2, 5)
backends = st.sampled_from(["gloo", "nccl"])
piece_bytes = st.sampled_from([1 << 18, 8])
"""Of exchanges over gloo: in one piece, or up to four."""


def sketch(operands: Sequence[Tensor], start: Callable[..., object], *options: object) -> fx.Graph:
    """A graph whose inputs are doubled and go through one collective.

    Doubling makes values that lowering may overwrite, which inputs are not.
    """
    graph = fx.Graph()
    with FakeTensorMode():
        for index, like in enumerate(operands):
            node = graph.placeholder(f"x{index}")
            fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
            node.meta = {"val": fake, "phase": "forward"}
    inputs = list(graph.nodes)
    doubled = []
    for node in inputs:
        twice = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2))
        twice.meta = {"val": node.meta["val"] * 2, "phase": "forward"}
        doubled.append(twice)
    results = collective(graph, inputs[0], start, doubled, *options)
    for result in results:
        result.meta["placement"] = Shard(0) if start in CUT else Replicate()
    graph.output(results)
    return graph


def training_graph(graph: fx.Graph, size: int) -> TrainingGraph:
    inputs = tuple(map(Input, range(len(graph.find_nodes(op="placeholder")))))
    (returned,) = next(iter(reversed(graph.nodes))).args
    outputs = tuple(map(Output, range(len(returned))))  # type: ignore[arg-type]
    return TrainingGraph(graph, inputs, outputs, {}, {AXIS: size})


def run(
    backend: str, parts: Sequence[Sequence[Tensor]], start: Callable[..., object], *options: object
) -> list[list[Tensor]]:
    """Lowers and runs a collective on every rank's tensors; `options` may differ by rank."""
    graphs = []
    for rank, operands in enumerate(parts):
        own = [o[rank] for o in options]  # type: ignore[index]
        graph = training_graph(sketch(operands, start, *own, AXIS), len(parts))
        graphs.append(LowerCollectives(backend, rank)(graph).graph)
        assert not list(starts(graphs[-1]))
    values = [dict(zip(map(Input, range(9)), [t / 2 for t in p], strict=False)) for p in parts]
    results: list[Results] = run_ranks(graphs, values)  # type: ignore[arg-type]
    return [[t for t in r.values() if t is not None] for r in results]


def whole(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-99, 99, shape, generator=gen).double()


@settings(max_examples=40)
@given(shapes, ranks, backends, piece_bytes)
def test_gathered_shards_are_the_whole(shapes: Shapes, n: int, backend: str, piece: int) -> None:
    tensors = [whole(shape) for shape in shapes]
    parts = list(zip(*(chunks(t, n) for t in tensors), strict=True))
    rows = [[t.shape[0] for t in tensors]] * n
    with mock.patch("autopar.core.gloo_chunks.CHUNK_BYTES", piece):
        answers = run(backend, parts, start_all_gather, rows)
    for found in answers:
        assert all(map(torch.equal, found, tensors))


@settings(max_examples=40)
@given(shapes, ranks, backends)
def test_chunks_are_exchanged(shapes: Shapes, n: int, backend: str) -> None:
    parts = [[whole((n, *shape), seed) for shape in shapes] for seed in range(n)]
    for rank, found in enumerate(run(backend, parts, start_all_to_all)):
        want = [torch.stack([p[i][rank] for p in parts]) for i in range(len(shapes))]
        assert all(map(torch.equal, found, want))


@settings(max_examples=40)
@given(shapes, st.data(), ranks, backends, piece_bytes)
def test_permuted_tensors_arrive(
    shapes: Shapes, data: st.DataObject, n: int, backend: str, piece: int
) -> None:
    targets = data.draw(st.permutations(range(n)))  # some ranks may send to themselves
    parts = [[whole(shape, rank) for shape in shapes] for rank in range(n)]
    with mock.patch("autopar.core.gloo_chunks.CHUNK_BYTES", piece):
        found = run(backend, parts, start_permute, [targets] * n)
    for rank, target in enumerate(targets):
        assert all(map(torch.equal, found[target], parts[rank]))


@settings(max_examples=40)
@given(shapes, ranks, backends, piece_bytes)
def test_scattered_sums_are_shards_of_the_sum(
    shapes: Shapes, n: int, backend: str, piece: int
) -> None:
    parts = [[whole(shape, rank) for shape in shapes] for rank in range(n)]
    rows = [[chunk_rows(shape[0], n)[rank] for shape in shapes] for rank in range(n)]
    with mock.patch("autopar.core.gloo_chunks.CHUNK_BYTES", piece):
        found = run(backend, parts, start_reduce_scatter, rows)
    for index, shape in enumerate(shapes):
        total = sum(part[index] for part in parts)
        joined = torch.cat([f[index] for f in found])
        assert joined.shape == shape
        assert joined.equal(total)  # type: ignore[arg-type]


@settings(max_examples=40)
@given(shapes, ranks, backends, st.booleans())
def test_reduced_values_are_the_sum(shapes: Shapes, n: int, backend: str, strided: bool) -> None:
    parts = [[whole(shape, rank) for shape in shapes] for rank in range(n)]
    if strided:
        parts = [[t.transpose(0, -1) for t in part] for part in parts]
    for found in run(backend, parts, start_all_reduce):
        for index, tensor in enumerate(found):
            assert tensor.equal(sum(part[index] for part in parts))  # type: ignore[arg-type]


@pytest.mark.parametrize("scalar", [True, False])
def test_scalars_and_others_share_a_buffer(scalar: bool) -> None:
    shape = () if scalar else (2, 3)
    parts = [[whole(shape, rank), whole((3,), rank)] for rank in range(2)]
    for found in run("gloo", parts, start_all_reduce):
        assert found[0].equal(parts[0][0] + parts[1][0])


def lowered(backend: str, rank: int, start: Callable[..., object], *options: object) -> str:
    graph = training_graph(sketch([whole((3, 2)), whole((4,))], start, *options, AXIS), 2)
    after = LowerCollectives(backend, rank)(graph).graph
    return text(after, lambda node: node.op == "call_function" and "mul" not in node.name)


def test_all_gather() -> None:
    assert_expected_inline(
        lowered("gloo", 0, start_all_gather, [5, 8]),
        """\
view_default: [6] = view(mul_tensor, [-1])
view_default_1: [4] = view(mul_tensor_1, [-1])
cat_default: [10] = cat([view_default, view_default_1])
all_to_all_single_default: [10] = all_to_all_single(cat_default, [0, 10], [0, 10], dp)
wait_tensor_default: [10] V = wait_tensor(all_to_all_single_default)
slice_tensor: [6] V = slice(wait_tensor_default, 0, 0, 6)
slice_tensor_1: [4] V = slice(wait_tensor_default, 0, 6, 10)
cat_default_1: [12] V = cat([view_default, slice_tensor])
view_default_2: [6,2] V = view(cat_default_1, [6, 2])
slice_tensor_2: [5,2] R = slice(view_default_2, 0, 0, 5)
cat_default_2: [8] V = cat([view_default_1, slice_tensor_1])
view_default_3: [8] R = view(cat_default_2, [8])""",
    )


def test_reduce_scatter_on_gloo_is_an_exchange_and_a_local_sum() -> None:
    assert_expected_inline(
        lowered("gloo", 0, start_reduce_scatter, [2, 2]),
        """\
constant_pad_nd_default: [4,2] = constant_pad_nd(mul_tensor, [0, 0, 0, 1])
slice_tensor: [2,2] = slice(constant_pad_nd_default, 0, 0, 2)
slice_tensor_1: [2] = slice(mul_tensor_1, 0, 0, 2)
slice_tensor_2: [2,2] = slice(constant_pad_nd_default, 0, 2, 4)
slice_tensor_3: [2] = slice(mul_tensor_1, 0, 2, 4)
view_default: [4] = view(slice_tensor_2, [-1])
view_default_1: [2] = view(slice_tensor_3, [-1])
cat_default: [6] = cat([view_default, view_default_1])
all_to_all_single_default: [6] = all_to_all_single(cat_default, [0, 6], [0, 6], dp)
wait_tensor_default: [6] V = wait_tensor(all_to_all_single_default)
slice_tensor_4: [4] V = slice(wait_tensor_default, 0, 0, 4)
slice_tensor_5: [2] V = slice(wait_tensor_default, 0, 4, 6)
view_default_2: [2,2] V = view(slice_tensor_4, [2, 2])
add__tensor: [2,2] S(0) = add_(view_default_2, slice_tensor)
view_default_3: [2] V = view(slice_tensor_5, [2])
add__tensor_1: [2] S(0) = add_(view_default_3, slice_tensor_1)""",
    )


def test_reduce_scatter_on_nccl() -> None:
    assert_expected_inline(
        lowered("nccl", 0, start_reduce_scatter, [2, 2]),
        """\
constant_pad_nd_default: [4,2] = constant_pad_nd(mul_tensor, [0, 0, 0, 1])
view_default: [2,4] = view(constant_pad_nd_default, [2, 4])
view_default_1: [2,2] = view(mul_tensor_1, [2, 2])
cat_default: [2,6] = cat([view_default, view_default_1], 1)
reduce_scatter_tensor_default: [1,6] = reduce_scatter_tensor(cat_default, sum, 2, dp)
wait_tensor_default: [1,6] V = wait_tensor(reduce_scatter_tensor_default)
view_default_2: [6] V = view(wait_tensor_default, [-1])
split_with_sizes_default: [4] [2] V = split_with_sizes(view_default_2, [4, 2])
getitem_2: [4] V = getitem(split_with_sizes_default, 0)
view_default_3: [2,2] S(0) = view(getitem_2, [2, 2])
getitem_3: [2] V = getitem(split_with_sizes_default, 1)
view_default_4: [2] S(0) = view(getitem_3, [2])""",
    )


def reduced(change: Callable[[fx.Graph, fx.Node], None]) -> object:
    """What a single operand's all-reduce is lowered to, after a change of the graph."""
    graph = sketch([whole((3, 2))], start_all_reduce, AXIS)
    change(graph, next(n for n in graph.nodes if n.target is torch.ops.aten.mul.Tensor))
    after = LowerCollectives("gloo", 0)(training_graph(graph, 2)).graph
    (found,) = [n.target for n in after.calls() if "all_reduce" in n.name]
    return found


def test_a_buffer_is_reduced_in_place_only_where_nothing_else_reads_it() -> None:
    def read_later(graph: fx.Graph, node: fx.Node) -> None:
        output = next(iter(reversed(graph.nodes)))
        output.args = ([*output.args[0], node],)

    def be_an_input(graph: fx.Graph, node: fx.Node) -> None:
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    assert reduced(lambda graph, node: None) is c10d.all_reduce_.default
    assert reduced(be_an_input) is c10d.all_reduce.default
    assert reduced(read_later) is c10d.all_reduce.default


def test_results_that_nobody_uses_are_not_cut() -> None:
    graph = sketch([whole((3, 2)), whole((4,))], start_all_reduce, AXIS)
    first, second = (n for n in graph.nodes if n.target is operator.getitem)
    output = next(iter(reversed(graph.nodes)))
    output.args = ([first, None],)
    graph.erase_node(second)
    after = LowerCollectives("gloo", 0)(training_graph(graph, 2)).graph
    after.graph.lint()
    assert not list(starts(after))


def test_says_why_it_declined() -> None:
    assert (
        LowerCollectives("gloo", 0)(two_layers().capture(0).captured_graph).reason
        == "there is no collective"
    )
