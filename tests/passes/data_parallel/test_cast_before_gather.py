from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from autopar.core.ir.graph import TrainingGraph, tensor_bytes, tensors
from autopar.core.ir.mesh_levels import Levels
from autopar.core.plan.compression import Compressions
from autopar.core.plan.layout import Layout
from autopar.core.plan.plan import Plan
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.cast_before_gather import CastBeforeGather
from autopar.passes.data_parallel.shard_parameters import ShardParameters
from autopar.passes.pipeline import build_pass_pipeline
from tests.passes.golden import TwoLayers, changes
from tests.passes.parity import AXIS, World
from tests.passes.simulated import c10d


class Uses(nn.Module):
    """Parameters used cast, as stored, both ways, through views, and in two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.conv = nn.Linear(8, 16), nn.Conv1d(16, 8, 3, padding=1)
        self.halved, self.flat = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(16, 4))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight  # tied: looked up as stored, multiplied cast

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(self.embedding(x))
        hidden = torch.tanh(self.conv(self.up(rows).transpose(1, 2)).transpose(1, 2))
        hidden = hidden @ self.flat.view(8, 8) + hidden @ self.halved + self.halved.half().sum()
        return self.head(self.frozen(hidden))


class Chain(nn.Module):
    """The first block is gathered again for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Uses(), nn.Linear(11, 3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x)).square().mean()


def world(model: type[nn.Module] = Chain, ranks: int = 2) -> World:
    """The model under autocast, with four rows."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (4, 6), generator=generator)
    if model is TwoLayers:
        x = torch.randn(4, 4, generator=generator)
    it = World(model(), ((x,), {}), ranks)
    with torch.autocast("cpu", torch.bfloat16):
        it.graph(0), it.plain()
    return it


def gathered(graph: TrainingGraph) -> dict[str, str]:
    """The dtype that each gathered parameter travels in, by phase and name."""
    return {
        f"{node.meta['phase'][0]} {node.meta['gathered']}": str(tensors(node)[0].dtype)[6:]
        for node in graph.calls()
        if "gathered" in node.meta
    }


def test_shards_are_cast_and_smaller_messages_gathered() -> None:
    zero = (("", 0), ("blocks.0", 3), ("blocks.1", 0))
    before = run_passes(
        world(TwoLayers).graph(0), [AssignBatchAxis(AXIS), ShardParameters(AXIS, 0, zero)]
    )
    assert_expected_inline(
        changes(before, run_passes(before, [CastBeforeGather()])),
        """\
+ _to_copy_default_2: [2,4] S(0) = _to_copy(blocks.0.weight, dtype=torch.bfloat16)
+ start_all_gather_1: [3,4] R = start_all_gather([_to_copy_default_2], [3], dp)
+ wait_2: [3,4] R = wait(start_all_gather_1)
+ getitem_2: [3,4] R = getitem(wait_2, 0)
~ t: [4,3] R = t(getitem_2)
- start_all_gather: [3,4] R = start_all_gather([blocks.0.weight], [3], dp)
- wait_1: [3,4] R = wait(start_all_gather)
- getitem_1: [3,4] R = getitem(wait_1, 0)
- _to_copy: [3,4] R = _to_copy(getitem_1, dtype=torch.bfloat16)""",
    )


def test_only_parameters_with_one_cast_travel_cast() -> None:
    passes = [AssignBatchAxis(AXIS), ShardParameters(AXIS, 0, ZERO_3), CastBeforeGather()]
    assert_expected_inline(
        "\n".join(f"{k}: {v}" for k, v in gathered(run_passes(world().graph(0), passes)).items()),
        """\
f blocks.0.embedding.weight: float32
f blocks.0.norm.weight: float32
f blocks.0.norm.bias: float32
f blocks.0.up.bias: bfloat16
f blocks.0.up.weight: bfloat16
f blocks.0.conv.bias: bfloat16
f blocks.0.conv.weight: bfloat16
f blocks.0.flat: bfloat16
f blocks.0.halved: float32
f blocks.0.frozen.bias: bfloat16
f blocks.0.frozen.weight: bfloat16
f blocks.1.bias: bfloat16
f blocks.1.weight: bfloat16
b blocks.0.embedding.weight: bfloat16
b blocks.0.frozen.weight: bfloat16
b blocks.0.halved: bfloat16
b blocks.0.flat: bfloat16
b blocks.0.conv.weight: bfloat16
b blocks.0.up.weight: bfloat16
b blocks.0.norm.weight: float32
b blocks.0.norm.bias: float32""",
    )


ZERO_3 = (("", 3), ("blocks.0", 3), ("blocks.1", 3))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_numbers_are_those_of_gathers_as_stored(zero: int, recompute: str) -> None:
    it = world()
    assert_same(it, it.plan(zero, recompute))


def test_the_numbers_are_the_same_over_levels() -> None:
    it = world(ranks=4)
    levels = Levels(AXIS, 2, (("all_gather", 1), ("reduce_scatter", 1)))
    assert_same(it, it.plan(3, levels=(levels,)))


def test_a_bf16_message_of_a_cast_parameter_loses_nothing() -> None:
    """`compress_gathers="bf16"` rounds as the cast does."""
    it = world(TwoLayers)
    plan = it.plan(3)
    kinds = {k: ("bf16",) * len(getattr(plan.buckets, k)) for k in ("gather", "regather")}
    assert_same(it, replace(plan, compressions=Compressions(**kinds)), plan)


def assert_same(it: World, plan: Plan, stored: Plan | None = None) -> None:
    """All results are equal bit for bit to those of `stored` without the pass."""

    def lowered(plan: Plan, *disable: str) -> list[TrainingGraph]:
        return [
            run_passes(
                replace(it.graph(rank), axes=Layout(plan).axes),
                build_pass_pipeline(plan, rank, "gloo", disable=disable),
            )
            for rank in range(it.ranks)
        ]

    ours, theirs = lowered(plan), lowered(stored or plan, "cast_before_gather")
    assert sum(map(sent_bytes, ours)) < sum(map(sent_bytes, theirs))
    for result, want in zip(it.run(ours), it.run(theirs), strict=True):
        assert result.keys() == want.keys()
        for role, value in want.items():
            assert value is result[role] or torch.equal(value, result[role]), role  # type: ignore[arg-type]


def sent_bytes(graph: TrainingGraph) -> int:
    """Bytes of all messages of a lowered graph."""
    return sum(tensor_bytes(tensors(node)[0]) for node in graph.calls() if node.target in SENT)


SENT = {c10d.all_reduce.default, c10d.all_gather_into_tensor.default,
        c10d.all_to_all_single.default, c10d.reduce_scatter_tensor.default}  # fmt: skip
