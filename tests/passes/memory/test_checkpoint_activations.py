from dataclasses import replace
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, fx, nn

from autopar.core.ir.aliases import is_view
from autopar.core.ir.graph import TrainingGraph
from autopar.core.ir.roles import Buffer
from autopar.core.plan.recompute import Level
from autopar.passes.core.node_builder import is_random
from autopar.passes.core.runner import run_passes
from autopar.passes.data_parallel.assign_batch_axis import AssignBatchAxis
from autopar.passes.data_parallel.synchronize_gradients import SynchronizeGradients
from autopar.passes.memory.checkpoint_activations import CheckpointActivations, storage_bytes
from autopar.passes.memory.lower_attention import LowerAttention
from autopar.passes.pipeline import build_pass_pipeline
from autopar.passes.rules.proof.oracle import is_close
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.harness.models import MODELS
from tests.harness.reference import to_dtype
from tests.passes.golden import TwoLayers, changes, order, two_layers
from tests.passes.parity import AXIS, World, assert_parity
from tests.passes.partitions import AXIS as MODEL_AXIS
from tests.passes.partitions import captured, partitioned, whole


@lru_cache
def gpt() -> World:
    case = MODELS["dropout"]
    return World(case.make().double(), to_dtype(case.batch(4, 0), torch.float64), 2)


def checkpointed(graph: TrainingGraph, level: Level, budget: int | None = None) -> TrainingGraph:
    return run_passes(graph, [CheckpointActivations(level, budget)])


def kept_bytes(graph: TrainingGraph) -> int:
    """Bytes of the storages that the forward creates and the backward reads."""
    read = {n for node in graph.calls() if is_late(node) for n in node.all_input_nodes}
    return storage_bytes(n for n in read if n.op == "call_function" and not is_late(n))


def is_late(node: fx.Node) -> bool:
    return bool(node.meta["phase"] == "backward")


def test_full_recomputes_what_a_block_computes() -> None:
    graph = two_layers().graph(0)
    assert_expected_inline(
        changes(graph, checkpointed(graph, "full")),
        """\
+ tanh_1: [2,3] V = tanh(mm)
~ mm_2: [2,3] P(sum) = mm(t_2, tanh_1)
+ t_9: [3,2] R = t(blocks.1.weight)
~ t_4: [2,3] R = t(t_9)
~ tanh_backward: [2,3] V = tanh_backward(mm_3, tanh_1)""",
    )


def test_selective_keeps_matrix_products() -> None:
    graph = two_layers().graph(0)
    after = checkpointed(graph, "selective")
    assert_expected_inline(
        order(after, lambda node: "recomputed" in node.meta),
        """\
b tanh_1
b t_9""",
    )


def test_clones_stand_right_before_their_use() -> None:
    """A run of clones is followed by what made them necessary."""
    after = checkpointed(gpt().graph(0), "full")
    run: list[fx.Node] = []
    runs = 0
    for node in after.calls():
        if "recomputed" in node.meta:
            run.append(node)
        elif run:
            assert set(run) & set(node.all_input_nodes), (run, node)
            run, runs = [], runs + 1
    assert runs > 1


def test_levels_keep_less_and_less() -> None:
    graph = gpt().graph(0)
    levels: tuple[Level, ...] = ("none", "selective", "full")
    none, selective, full = (kept_bytes(checkpointed(graph, level)) for level in levels)
    assert full < selective < none


def test_budget_raises_blocks_until_it_holds() -> None:
    graph = gpt().graph(0)
    selective, none = (kept_bytes(checkpointed(graph, x)) for x in ("selective", "none"))  # type: ignore
    middle = (selective + none) // 2
    kept = kept_bytes(checkpointed(graph, "none", middle))
    assert selective < kept <= middle


def test_a_budget_raises_levels_that_the_planner_does_not_try() -> None:
    graph = gpt().graph(0)
    for level, raised in (("regather", "full"), ("everything", "everything")):
        found, want = (kept_bytes(checkpointed(graph, *x)) for x in ((level, 0), (raised,)))  # type: ignore
        assert found == want


def test_random_numbers_and_statistics_are_never_drawn_again() -> None:
    graph = run_passes(gpt().graph(0), [AssignBatchAxis(AXIS)])
    after = checkpointed(graph, "full")
    again = [node for node in after.calls() if "recomputed" in node.meta]
    assert not any(is_random(n) or "start_" in n.name or "wait" in n.name for n in again)
    assert sum(map(is_random, after.calls())) == sum(map(is_random, graph.calls()))


class AttentionBlock(nn.Module):
    """Attention inside of a block, with a residual."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(4, 12), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t[:, None] for t in self.project(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return x + torch.tanh(y[:, 0])


class Attending(nn.Module):
    """Two blocks with attention, and a loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([AttentionBlock(dropout) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize(
    ("level", "dropout", "again"),
    [("full", 0.0, 0), ("everything", 0.0, 2), ("everything", 0.5, 0)],
)
def test_attention_runs_again_at_the_last_level_unless_it_draws(
    level: Level, dropout: float, again: int
) -> None:
    x = torch.randn(4, 3, 4, dtype=torch.float64)
    item = World(Attending(dropout).double(), ((x,), {}), 1)
    graph = run_passes(item.graph(0), [LowerAttention("cpu")])
    assert any(map(is_random, graph.calls())) == bool(dropout)
    after = checkpointed(graph, level)
    clones = [n for n in after.calls() if "recomputed" in n.meta and "attention" in str(n.target)]
    assert len(clones) == again
    if not dropout:
        assert_parity(item, [after])


class Counted(TwoLayers):
    """What the backward computes again must not read a buffer's new value."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        z, scale = self.blocks[0](x), self.blocks[0].scale[1:]  # type: ignore[index]
        z = (z + scale).sin() * (z - scale).cos()
        self.blocks[0].scale.mul_(2)  # type: ignore[operator,union-attr]
        return self.blocks[1](torch.tanh(z)).square().mean()


@pytest.mark.parametrize("level", ["selective", "full"])
def test_a_buffer_that_changes_is_read_by_the_forward_only(level: Level) -> None:
    """When the backward runs, the buffer has its new value."""
    it = World(Counted().double(), two_layers().batch, 2)
    scale = checkpointed(it.graph(0), level).placeholder(Buffer("blocks.0.scale"))
    assert scale is not None
    views = [user for user in scale.users if is_view(user)]
    assert views
    readers = [*scale.users, *(user for view in views for user in view.users)]
    assert {user.meta["phase"] for user in readers} == {"forward"}


class Checkpointed(nn.Module):
    """Reading a clone of a view of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x.flip(1).exp()).sin().square().mean()


@pytest.mark.parametrize("model", [TwoLayers, Counted, Checkpointed])
@pytest.mark.parametrize("level", ["none", "selective", "full"])
def test_gradients_do_not_change(model: type[nn.Module], level: Level) -> None:
    it = World(model().double(), two_layers(rows=5).batch, 2)
    passes = [AssignBatchAxis(AXIS), CheckpointActivations(level)]
    assert_parity(it, it.lower(lambda rank: [*passes, SynchronizeGradients(AXIS, rank)]))


def test_says_why_it_declined() -> None:
    it = two_layers()
    assert CheckpointActivations()(it.graph(0)).reason == "everything is kept"
    assert CheckpointActivations("none", 1 << 30)(it.graph(0)).reason == (
        "everything is kept, within the budget"
    )
    forward = replace(it, differentiate=False).graph(0)
    assert CheckpointActivations("full")(forward).reason == "there is no backward"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["gpt", "conv", "encdec", "odd"])
def test_what_a_compiler_is_given_equals_the_plain_model(name: str, stage: int) -> None:
    case = MODELS[name]
    batch = to_dtype(case.batch(6, 0), torch.float64)
    it = World(case.make().double(), batch, 2, case.loss)
    plan = it.plan(stage)
    assert_parity(it, it.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo", compiled=True)))


def test_fused_operators_are_computed_again_inside_their_block() -> None:
    graph = gpt().graph(0)
    kept = run_passes(graph, [CheckpointActivations("none")])
    fused = run_passes(graph, [CheckpointActivations("none", fuses=True)])
    assert kept_bytes(fused) < 0.9 * kept_bytes(kept)
    again = {str(node.target) for node in fused.calls() if "recomputed" in node.meta}
    assert "aten.gelu.default" in again
    assert not again & {"aten.mm.default", "aten.native_layer_norm.default"}


@pytest.mark.slow
def test_what_was_gathered_is_gathered_again() -> None:
    """Also where it was copied into another layout, and this rank's part is kept alone."""
    case, ranks = MODELS["gpt"], 2
    batch = to_dtype(case.batch(5, 0), torch.float64)
    graph, values = captured(case.make().double(), batch, ranks)
    op_strategies = partition_by_bytes(graph, ranks)
    divided = run_passes(graph, [PartitionAxis(MODEL_AXIS, 0, op_strategies)])
    assert kept_bytes(checkpointed(divided, "regather")) < kept_bytes(divided)
    want, again = whole(graph, values), CheckpointActivations("regather")
    for role, made in partitioned(graph, ranks, op_strategies, values, again).items():
        assert made is not None
        assert is_close(made, want[role]), role
