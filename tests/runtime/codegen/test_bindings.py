"""Generated code calls methods and functions of torch, where they dispatch the same operators."""

import torch
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar.passes.core.node_builder import aten
from autopar.runtime.codegen.bindings import scaled_mm_in_layout, split_at_once, use_bindings
from tests.harness.models import MODELS
from tests.harness.training import fixed
from tests.passes.parity import World


def test_most_operators_have_a_binding_and_the_rest_stays() -> None:
    case = MODELS["gpt"]
    graph = World(case.make(), case.batch(4, 0), 1).graph(0).copy().graph
    use_bindings(graph)
    targets = {node.target for node in graph.nodes if node.op.startswith("call")}
    assert {"view", "t", "add", torch.embedding} <= targets
    assert aten.native_layer_norm_backward.default in targets
    (view, *_) = (node for node in graph.nodes if node.target == "view")
    assert all(isinstance(size, int) for size in view.args[1:])


def test_a_binding_that_dispatches_otherwise_is_not_used() -> None:
    """`Tensor.sum_to_size` of an operator's name, but `aten.sum` with a dtype, is `sum`."""
    graph, fake = torch.fx.Graph(), torch._subclasses.FakeTensorMode()
    x = graph.placeholder("x")
    x.meta["val"] = fake.from_tensor(torch.ones(2, 3))
    kept = graph.call_function(aten.slice.Tensor, (x, 0, 0, 1))
    made = graph.call_function(aten.zeros.default, ([2],))
    for node in (kept, made):
        node.meta["val"] = x.meta["val"]
    use_bindings(graph)
    assert (kept.target, made.target) == (aten.slice.Tensor, aten.zeros.default)


def test_the_copy_of_cuda_is_the_operator() -> None:
    table = torch.randn(3, 7)
    want = torch.split_with_sizes_copy(table, [2, 0, 5], 1)
    assert all(map(torch.equal, split_at_once(table, [2, 0, 5], 1), want))


def test_the_product_of_cuda_is_the_operator() -> None:
    a, b = (torch.randn(n, 32).to(torch.float8_e4m3fn) for n in (16, 48))
    rest = torch.tensor(0.5), torch.tensor(0.25), None, None, torch.bfloat16
    want = aten._scaled_mm.default(a, b.t(), *rest)
    assert torch.equal(scaled_mm_in_layout(a, b.t().contiguous(), *rest), want)


def test_a_profiler_sees_blocks() -> None:
    case = MODELS["gpt"]
    args, _ = case.batch(4, 0)
    model = autopar.compile(case.make(), strategy=fixed(0), example_inputs=args)
    plain = model(*args)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss = model(*args)
        loss.backward()
    names = {event.key for event in recorded.key_averages()}
    blocks = {f"autopar: {p} of blocks.{i}" for p in ("forward", "backward") for i in (0, 1)}
    assert blocks <= names
    assert torch.equal(plain, loss)
