"""The kernels that attention becomes: the plain model's bits, fused on GPUs, dropout divided."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.capture.batch_slices import capture_of_rank
from autopar.core.ir.graph import TrainingGraph, tensors
from autopar.core.ir.placement import Shard
from autopar.core.ir.roles import Gradient
from autopar.core.operators.attention import attention, attention_backward
from autopar.core.operators.random_streams import other_stream
from autopar.cost_model.kernels.timing import flops_of
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.passes.core.node_builder import is_view
from autopar.passes.core.runner import run_passes
from autopar.passes.memory.lower_attention import LowerAttention
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.core.operators.test_attention import Layer
from tests.harness.models import MODELS
from tests.passes.partitions import AXIS, captured, partitioned, whole


def layer(dtype: torch.dtype, slices: int = 1, **options: Any) -> TrainingGraph:
    model = Layer(**options).to(dtype)
    return capture_of_rank(model, (torch.randn(4, 8, 16, dtype=dtype),), 0, slices)


def kernels(graph: TrainingGraph) -> list[str]:
    """The kernels of attention in a graph."""
    names = (str(node.target) for node in graph.calls())
    return [name for name in names if "attention" in name or "_safe_softmax" in name]


def saved_scores(graph: TrainingGraph) -> list[str]:
    """Values of the forward with a number for each pair of positions, read by the backward."""
    return [
        node.name
        for node in graph.calls()
        if node.meta["phase"] == "forward"
        and not is_view(node)
        and any(user.meta.get("phase") == "backward" for user in node.users)
        and any(t.shape[-2:] == (8, 8) and t.dim() > 2 for t in tensors(node))
    ]


@pytest.mark.parametrize("name", ["gpt", "dropout", "encdec"])
def test_one_cpu_computes_the_bits_of_the_plain_model(name: str) -> None:
    case = MODELS[name]
    model, batch = case.make().double(), case.batch(4, 0)
    graph, values = captured(model, batch, 1)
    torch.manual_seed(3)
    loss = case.loss(model(*batch[0], **batch[1]))
    loss.backward()
    torch.manual_seed(3)
    results = whole(run_passes(graph, [LowerAttention("cpu")]), values)
    wanted = {n: p.grad for n, p in model.named_parameters()}
    compared = [
        torch.equal(value, wanted[role.of.name])  # type: ignore[union-attr, arg-type]
        for role, value in results.items()
        if isinstance(role, Gradient)
    ]
    assert len(compared) > 5
    assert all(compared)


@pytest.mark.parametrize(
    ("options", "dtype", "kernel"),
    [
        ({}, torch.bfloat16, "flash"),
        ({"dropout": 0.1}, torch.bfloat16, "flash"),
        ({"grouped": True}, torch.bfloat16, "flash"),
        ({"biased": True}, torch.bfloat16, "efficient"),
        ({"dropout": 0.1}, torch.float32, "efficient"),
        ({"grouped": True}, torch.float32, "softmax"),
        ({}, torch.float64, "softmax"),
    ],
)
def test_gpus_keep_no_scores_where_a_kernel_is_fused(
    options: dict[str, Any], dtype: torch.dtype, kernel: str
) -> None:
    graph = layer(dtype, 2, **options)
    lowered = run_passes(graph, [LowerAttention("cuda")])
    assert kernel in kernels(lowered)[0]
    assert bool(saved_scores(lowered)) == (kernel == "softmax")
    with_dropout = run_passes(layer(dtype, dropout=0.1), [LowerAttention("cpu")])
    assert saved_scores(with_dropout)


def test_attention_with_dropout_is_divided_and_drops_what_one_device_drops() -> None:
    case = MODELS["dropout"]
    graph, values = captured(case.make().double(), case.batch(4, 0), 2)
    strategies = partition_by_bytes(graph, 2, {"*attention.qkv.weight": Shard(0, 3)})
    divided = [str(s) for name, s in strategies if name.startswith("attention")]
    assert len(divided) == 4
    assert all("attention_window" in text for text in divided)
    torch.manual_seed(3)
    wanted = whole(run_passes(graph, [LowerAttention("cpu")]), values)
    torch.manual_seed(3)
    found = partitioned(graph, 2, strategies, values, LowerAttention("cpu"))
    assert max(float((wanted[role] - value).abs().max()) for role, value in found.items()) < 1e-13  # type: ignore[operator]


def test_fused_kernels_of_ranks_draw_from_different_streams() -> None:
    graph = replace(layer(torch.bfloat16, dropout=0.1), axes={AXIS: 2})
    strategies = partition_by_bytes(graph, 2, {"project.weight": Shard(0, 3)})
    streams = []
    for rank in range(2):
        passes = [PartitionAxis(AXIS, rank, strategies), LowerAttention("cuda")]
        nodes = run_passes(graph, passes).calls()
        streams += [n.kwargs["stream"] for n in nodes if "on_stream" in str(n.target)]
    assert len(streams) == len(set(streams)) == 2


class Generator:
    """A CUDA generator: a seed and an offset, which setting the seed clears."""

    seed, offset = 7, 40

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset

    def manual_seed(self, seed: int) -> None:
        self.seed, self.offset = seed, 0


def test_a_stream_leaves_the_generator_as_the_kernel_would() -> None:
    generator, seen = Generator(), []
    for stream in (0, 1):
        with other_stream(generator, stream):
            seen.append(generator.seed)
            assert generator.offset == 40 + 4 * stream
            generator.offset += 4
        assert generator.seed == 7
    assert len({7, *seen}) == 3
    assert generator.offset == 48


def test_a_backward_apart_from_its_forward_computes_it_again() -> None:
    model = Layer().double()
    graph, values = captured(model, ((torch.randn(4, 8, 16, dtype=torch.float64),), {}), 1)
    wanted = whole(graph, values)
    graph = graph.copy()
    (backward,) = (n for n in graph.calls() if n.target is attention_backward)
    statistics = backward.args[6]
    with graph.graph.inserting_before(backward):
        copy = graph.graph.call_function(torch.ops.aten.clone.default, (statistics,))
    copy.meta = {**statistics.meta, "phase": "backward"}  # type: ignore[union-attr]
    backward.replace_input_with(statistics, copy)  # type: ignore[arg-type]
    lowered = run_passes(graph, [LowerAttention("cpu")])
    found = whole(lowered, values)
    assert kernels(lowered).count("aten._scaled_dot_product_flash_attention_for_cpu.default") >= 2
    for role, value in wanted.items():
        torch.testing.assert_close(found[role], value)


def test_the_price_is_that_of_the_devices_kernels() -> None:
    graph = layer(torch.bfloat16)
    times = OperatorTimes.load("NVIDIA H100 80GB HBM3")
    lowered = run_passes(graph, [LowerAttention("cuda")])

    def seconds(of: TrainingGraph) -> float:
        nodes = (n for n in of.calls() if "attention" in str(n.target))
        return sum(times.seconds(node).seconds for node in nodes)

    assert seconds(graph) == pytest.approx(seconds(lowered), rel=0.2)
    (forward,) = (n for n in graph.calls() if n.target is attention)
    assert flops_of(forward) == 2 * 2 * 4 * 4 * 8 * 8 * 4
