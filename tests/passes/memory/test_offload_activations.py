import torch
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from autopar.core.ir.graph import GraphProperty, TrainingGraph
from autopar.core.ir.messages import is_storage_wait, transfer_of
from autopar.passes.core.pass_base import Pass
from autopar.passes.core.runner import run_passes
from autopar.passes.memory.checkpoint_activations import CheckpointActivations
from autopar.passes.memory.offload_activations import OffloadActivations, saved_values
from tests.harness.emulated_streams import emulated_streams
from tests.harness.models import MODELS
from tests.passes.golden import changes, order
from tests.passes.parity import World, assert_parity

BLOCKS = ("", "blocks.0", "blocks.1")
EVERYTHING = OffloadActivations(BLOCKS, "/nvme", least_bytes=1)


def gpt() -> TrainingGraph:
    case = MODELS["gpt"]
    return World(case.make().double(), case.batch(8, 0), 1).graph(0)


def lowered(graph: TrainingGraph, *passes: Pass) -> TrainingGraph:
    return run_passes(graph, passes)


def moves(node: fx.Node) -> bool:
    return transfer_of(node) is not None or is_storage_wait(node)


class ThreeLayers(nn.Module):
    """Layers whose saved values are of one size, so that the last one stays."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.mean()


def three_layers() -> World:
    return World(ThreeLayers().double(), ((torch.ones(2, 4, dtype=torch.float64),), {}), 1)


def test_a_saved_value_is_written_and_read_before_its_reader() -> None:
    graph = three_layers().graph(0)
    after = lowered(graph, OffloadActivations(BLOCKS, "/nvme", least_bytes=1))
    assert_expected_inline(
        changes(graph, after),
        """\
+ offload_default: [1] = offload(tanh, /nvme)
+ offload_default_1: [1] = offload(tanh_1, /nvme)
+ offloaded_default: [1] = offloaded(offload_default, tanh)
+ offloaded_default_1: [1] = offloaded(offload_default_1, tanh_1)
+ prefetch_default: [2,4] = prefetch(offloaded_default_1, /nvme, [2, 4], [4, 1], torch.float64, cpu)
+ prefetch_default_1: [2,4] = prefetch(offloaded_default, /nvme, [2, 4], [4, 1], torch.float64, cpu)
+ prefetched_default: [2,4] = prefetched(prefetch_default, offloaded_default_1)
~ mm_3: [4,4] = mm(t_3, prefetched_default)
~ tanh_backward_1: [2,4] = tanh_backward(mm_4, prefetched_default)
+ prefetched_default_1: [2,4] = prefetched(prefetch_default_1, offloaded_default)
~ mm_5: [4,4] = mm(t_7, prefetched_default_1)
~ tanh_backward_2: [2,4] = tanh_backward(mm_6, prefetched_default_1)""",
    )


def test_values_of_a_gpu_go_to_its_host_and_come_back() -> None:
    world = three_layers()
    after = lowered(world.graph(0), OffloadActivations(BLOCKS, "", least_bytes=1))
    with emulated_streams() as gpu:
        assert_parity(world, [after])
    assert gpu.copies == 4
    assert not gpu.errors


def test_transfers_stand_ahead_of_their_readers() -> None:
    """Writes go on beside the forward, at most two at once; so do reads beside the backward."""
    after = lowered(gpt(), OffloadActivations(BLOCKS, "/nvme"))
    assert_expected_inline(
        order(after, moves),
        """\
f offload_default
f offload_default_1
f offloaded_default
f offload_default_2
f offloaded_default_1
f offload_default_3
f offloaded_default_2
f offload_default_4
f offloaded_default_3
f offloaded_default_4
b prefetch_default
b prefetch_default_1
b prefetched_default
b prefetch_default_2
b prefetched_default_1
b prefetch_default_3
b prefetched_default_2
b prefetch_default_4
b prefetched_default_3
b prefetched_default_4""",
    )


def test_what_is_recomputed_is_not_stored() -> None:
    full = CheckpointActivations("full")
    counts = []
    for passes in ((EVERYTHING,), (full, EVERYTHING)):
        after = lowered(gpt(), *passes)
        assert GraphProperty.ACTIVATIONS_OFFLOADED in after.properties
        counts.append(sum(transfer_of(node) is not None for node in after.calls()))
    assert 0 < counts[1] < counts[0]


def test_blocks_that_are_not_named_stay_in_memory() -> None:
    after = lowered(gpt(), OffloadActivations(("blocks.1",), "/nvme", least_bytes=1))
    written = [n.args[0] for n in after.calls() if transfer_of(n) == "storage write"]
    assert {node.meta["block"] for node in written} == {"blocks.1"}  # type: ignore[union-attr]


def test_inputs_and_results_stay() -> None:
    graph = gpt()
    values = [value.node for value in saved_values(graph)]
    assert values
    assert not set(values) & {*graph.placeholders, *graph.results}
