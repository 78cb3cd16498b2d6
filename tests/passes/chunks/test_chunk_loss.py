"""Losses in chunks of rows are those of the plain model, and no value is as large as the logits."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import autopar
from autopar.core.ir.graph import TrainingGraph, operands, tensors
from autopar.core.ir.placement import Shard
from autopar.core.ir.roles import Gradient, Output
from autopar.errors import StrategyError
from autopar.passes.chunks.chunk_loss import ChunkLoss
from autopar.passes.core.runner import run_passes
from autopar.passes.pipeline import build_pass_pipeline
from autopar.passes.tensor_parallel.partition_axis import PartitionAxis
from autopar.planner.placement.unmeasured import partition_by_bytes
from tests.harness.reference import relative_error
from tests.harness.training import fixed, whole_state
from tests.harness.worlds import run
from tests.passes.chunks.losses import IGNORED, LOSSES, WIDTH, WORDS, Words, batch
from tests.passes.golden import order
from tests.passes.parity import World, assert_parity, parity_errors
from tests.passes.partitions import AXIS as MODEL_AXIS
from tests.passes.partitions import captured, partitioned, whole

ROWS, LENGTH = 4, 5


def world(
    loss: str, ranks: int = 1, rows: int = ROWS, length: int = LENGTH, **options: Any
) -> World:
    """The model on some ranks."""
    returns_pair = options.get("returns_logits", False)
    given = batch(rows, length, ignored=0.0 if loss == "ignored" else 0.2)
    model = Words(loss, **options).double()
    return World(model, given, ranks, lambda out: out[0] if returns_pair else out)


def chunked(item: World, chunks: int, zero: int = 0) -> list[TrainingGraph]:
    """Every rank's program with the loss in chunks."""
    plan = item.plan(zero, loss_chunks=chunks)
    graphs = item.lower(lambda rank: build_pass_pipeline(plan, rank, "gloo"))
    assert not any("declined" in line for line in graphs[0].history if "chunk_loss" in line)
    return graphs


def largest(graph: TrainingGraph) -> int:
    """Numbers of the largest value of a graph."""
    return max(tensor.numel() for node in graph.calls() for tensor in tensors(node))


@pytest.mark.parametrize("loss", LOSSES)
def test_equals_the_plain_model(loss: str) -> None:
    item = world(loss)
    graphs = chunked(item, 3)
    assert_parity(item, graphs)
    assert largest(graphs[0]) <= ROWS * LENGTH * WIDTH < ROWS * LENGTH * WORDS


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True, "tied": True},
        {"shift": "labels", "returns_logits": True},
        {"shift": "logits", "returns_logits": True},
        {"shift": "logits", "rows": 1, "length": 9},
        {"rows": 1, "length": 20},
        {"ranks": 2, "rows": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("chunks", [2, 8])
def test_of_other_models(options: dict[str, Any], chunks: int) -> None:
    item = world("smoothed", **options)
    assert_parity(item, chunked(item, chunks))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("loss", "early"),
    [("mean", True), ("sum", True), ("in double", True), ("uniform", True), ("smoothed", False)],
)
def test_one_number_scales_gradients_of_the_forward(loss: str, early: bool, ranks: int) -> None:
    """The backward multiplies no matrices for the head, so it reads neither hidden nor weight."""
    graph, *_ = chunked(world(loss, ranks=ranks), 3)
    products = [n for n in graph.calls() if n.target is torch.ops.aten.mm.default]
    of_head = [
        n for n in products if any(WORDS in t.shape for x in (n, *operands(n)) for t in tensors(x))
    ]
    assert len(of_head) == (9 if early else 12)
    assert {n.meta["phase"] for n in of_head} == ({"forward"} if early else {"forward", "backward"})


def test_stages_compute_gradients_in_their_backward() -> None:
    """A stage has several micro-batches under way, and would keep a gradient for each."""
    after = run_passes(world("mean").graph(0), [ChunkLoss(3, early=False)])
    assert sum(n.target is torch.ops.aten.mm.default for n in after.calls()) == 14


def test_of_gathered_parameters() -> None:
    item = world("mean", ranks=2)
    assert_parity(item, chunked(item, 4, zero=3))


def test_gives_nan_if_all_targets_are_ignored() -> None:
    model = Words("mean").double()
    (x, y), _ = batch(ROWS, LENGTH)
    item = World(model, ((x, torch.full_like(y, IGNORED)), {}), 1)
    (results,) = item.run(chunked(item, 3))
    assert results[Output(0)] is not None
    assert results[Output(0)].isnan()
    gradients = [value for role, value in results.items() if isinstance(role, Gradient)]
    assert len(gradients) == 4
    assert not any(gradient.count_nonzero() for gradient in gradients)


def test_sums_of_a_narrow_head_are_in_float32() -> None:
    item = world("mean", narrow_head=True)
    errors = parity_errors(item, chunked(item, 4))
    assert errors.pop(Output(0)) < 1e-6
    assert max(errors.values()) < 2**-7
    assert "float32" in str(chunked(item, 4)[0])


def test_order_of_operators() -> None:
    after = run_passes(world("sum", rows=2, length=1).graph(0), [ChunkLoss(2)])
    shown = ("mm", "_log", "nll", "add_", "cat")
    assert_expected_inline(
        order(after, lambda node: node.name.startswith(shown)),
        """\
f mm_default
f _log_softmax_default
f nll_loss_forward_default
f nll_loss_backward_default_1
f _log_softmax_backward_data_default
f mm_default_1
f mm_default_2
f mm_default_3
f _log_softmax_default_1
f nll_loss_forward_default_1
f nll_loss_backward_default_2
f _log_softmax_backward_data_default_1
f mm_default_4
f mm_default_5
f add_tensor
f add__tensor
f cat_default
b mm_3
b mm_4""",
    )


@pytest.mark.parametrize("shift", ["", "logits"])
def test_a_rank_with_one_column_divides_like_the_others(shift: str) -> None:
    """Of 7 words the ranks have 3, 3 and 1."""
    model = Words("z-loss", shift=shift, words=7).double()
    (x, y), _ = batch(ROWS, LENGTH)
    graph, values = captured(model, ((x % 7, torch.where(y > 0, y % 7, y)), {}), 3)
    strategies = partition_by_bytes(graph, 3, {"head.weight": Shard(0)})
    found = partitioned(graph, 3, strategies, values, ChunkLoss(3))
    for rank in range(3):
        after = run_passes(graph, [PartitionAxis(MODEL_AXIS, rank, strategies), ChunkLoss(3)])
        assert not after.notes
    for role, wanted in whole(graph, values).items():
        assert (result := found[role]) is not None
        assert relative_error(result, wanted) < 1e-9


# When it declines.


class Mixed(nn.Module):
    """A loss that sees all rows of the logits at once."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).log_softmax(0).square().sum()


def declined(item: World, **options: Any) -> str:
    """The note of a graph that is left as it is."""
    graph = item.graph(0)
    after = run_passes(graph, [ChunkLoss(3, **options)])
    assert str(after.graph) == str(graph.graph)
    (note,) = after.notes
    return note


def test_declines_where_rows_are_mixed() -> None:
    x = torch.randn(12, WIDTH, dtype=torch.float64)
    note = declined(World(Mixed().double(), ((x,), {}), 1), may_drop=True)
    assert "loss_chunks=3: the loss is computed as a whole: _log_softmax" in note


def test_returned_logits_are_kept_unless_they_may_be_dropped() -> None:
    assert "is returned" in declined(world("mean", returns_logits=True))


def test_declines_without_a_loss() -> None:
    head = nn.Linear(WIDTH, WORDS).double()
    item = World(
        head, ((torch.randn(12, WIDTH, dtype=torch.float64),), {}), 1, lambda out: out.sum()
    )
    assert "is returned" in declined(item, may_drop=True)


# Training.

STEPS = 3


def losses_of(model: nn.Module, parameters: Any) -> Iterator[tuple[float, Any]]:
    """The loss and the other results of each step, which differentiates it twice."""
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    for seed in range(STEPS):
        loss, *others = model(*batch(ROWS, 8, seed)[0])
        loss.backward(retain_graph=True)
        (seed * loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item(), others


def trained(rank: int, world_size: int, loss: str, **options: Any) -> Any:
    """Losses and final state of some steps, and the logits' text and what reading them says."""
    strategy = fixed(options.pop("zero", 0), loss_chunks=4, **options)
    model = Words(loss, returns_logits=True).double()
    parallel = autopar.compile(model, strategy=strategy, fallback=False)
    steps = list(losses_of(parallel, parallel.parameters()))
    (logits,) = steps[-1][1]
    why = ""
    try:
        logits.argmax(-1)
    except StrategyError as error:
        why = str(error)
    return [value for value, _ in steps], whole_state(parallel), repr(logits), why


@functools.cache
def plain(loss: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and final state of the plain model."""
    model = Words(loss, returns_logits=True).double()
    losses = [value for value, _ in losses_of(model, model.parameters())]
    return losses, model.state_dict()


@pytest.mark.parametrize(
    "options",
    [{"zero": 2}, {"tp": 2}, {"cp": 2, "zero": 3}, {"pp": 2, "micro_batches": 2}],
    ids=str,
)
@pytest.mark.parametrize("loss", ["mean", "z-loss"])
def test_trains_as_the_plain_model(options: dict[str, Any], loss: str) -> None:
    wanted, state = plain(loss)
    for losses, found, text, why in run(trained, world_size=2, loss=loss, **options):
        assert losses == pytest.approx(wanted, rel=1e-9)
        assert max(relative_error(found[name], state[name]) for name in state) < 1e-9
        assert text.startswith("AbsentRows(")
        assert "loss_chunks=1" in why


def twice(rank: int, world_size: int, chunks: int) -> list[Tensor]:
    """Gradients of the squares of a loss's gradients."""
    model = Words("mean", returns_logits=True).double()
    parallel = autopar.compile(model, strategy=fixed(loss_chunks=chunks), fallback=False)
    parameters = [*parallel.parameters()]
    loss = parallel(*batch(ROWS, 8)[0])[0]
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), parameters))


def test_gradients_of_gradients_are_whole() -> None:
    wanted, found = (run(twice, world_size=2, chunks=chunks)[0] for chunks in (1, 4))
    assert max(map(relative_error, found, wanted)) < 1e-9
