"""Models partitioned over ranks train exactly as on one, also over data-parallel ranks."""

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

import autopar
from autopar.core.ir.placement import Replicate, Shard
from autopar.passes.rules.lowerings.ring_attention import RING
from tests.harness.models import MODELS
from tests.harness.reference import Reference, batches, to_dtype, train_steps
from tests.harness.training import (
    ADAMW,
    Pair,
    assert_same_training,
    close,
    fixed,
    plain,
    shared_captures,
    whole_state,
)
from tests.harness.worlds import run

EXACT = 1e-9
MIXED = {"": 0, "blocks.0": 1, "blocks.1": 2}
ROWS = 12
f64 = torch.float64
FUSED = {"*.attention.qkv.*": Shard(0, 3)}
"""Heads of a fused projection: the shards are interleaved."""
CUT = {"embedding.weight": Shard(0), "*.up.*": Shard(0), "*.down.weight": Shard(1)}
"""A vocabulary and a feed-forward of sizes that no axis here divides."""


def batch_of(name: str, step: int, rows: int = ROWS) -> Any:
    return to_dtype(MODELS[name].batch(rows, step), f64)


def train(rank: int, world_size: int, name: str, setups: list[dict[str, Any]]) -> list[Reference]:
    found = []
    given = list(batches(MODELS[name], range(10), ROWS))
    for options in setups:
        model = autopar.compile(
            MODELS[name].make().double(), strategy=fixed(**options), fallback=False
        )
        with shared_captures(name, f64):
            losses = train_steps(model, ADAMW(model.parameters()), MODELS[name], given)
        assert model.plan is not None
        for partition in model.plan.partitions:
            assert options[partition.axis] == partition.ranks
            passed_on = partition.axis == "cp" and "ring_attention" in options
            assert partition.lowers(RING) == passed_on
            divided = bool(partition.parameters)
            assert divided == (partition.axis != "cp") or name in ("odd", "conv")  # by rows
        if options.get("zero") == 3 and not options.get("tp") and name != "uneven":
            assert held_share(model) <= 1.05 / world_size
        found.append(Reference(losses, whole_state(model)))
    return found


def held_share(model: nn.Module) -> float:
    """Share of a model's parameters that this rank holds between steps."""
    parameters = list(model.parameters())
    parts = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
    return sum(part.numel() for part in parts) / sum(p.numel() for p in parameters)


def slow(*values: Any) -> Any:
    """Parameters of a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "world_size", "setups"),
    [
        ("gpt", 2, [{"tp": 2, "placements": FUSED}, {"tp": 2, "recompute": "full"}]),
        ("moe", 2, [{"ep": 2}]),
        (
            "gpt",
            2,
            [{"cp": 2, "zero": 3}, {"cp": 2, "zero": MIXED}],
        ),
        ("moe", 2, [{"ep": 2, "zero": 3}]),
        (
            "gpt",
            2,
            [
                {"cp": 2, "ring_attention": True},
                {"cp": 2, "zero": 3, "recompute": "full", "ring_attention": True},
            ],
        ),
        slow("gpt", 3, [{"cp": 3, "zero": 3, "recompute": "everything", "ring_attention": True}]),
        slow("gpt", 4, [{"cp": 2, "tp": 2, "placements": FUSED, "ring_attention": True}]),
        slow("moe", 4, [{"cp": 2, "ep": 2, "zero": 3, "ring_attention": True}]),
        slow("uneven", 3, [{"cp": 3, "zero": 3}]),
        slow("gpt", 4, [{"cp": 2, "zero": 2}, {"tp": 2, "cp": 2, "zero": 3, "placements": FUSED}]),
        slow("moe", 4, [{"ep": 2, "zero": 3}, {"cp": 2, "ep": 2, "zero": 3}]),
        slow(
            "gpt", 4, [{"tp": 2, "zero": 0}, {"tp": 2, "zero": 3, "placements": FUSED}, {"tp": 4}]
        ),
        slow("encoder", 4, [{"tp": 2, "zero": 3}, {"tp": 4}]),
        slow("moe", 4, [{"tp": 2, "zero": 2}, {"tp": 4}]),
        slow("conv", 4, [{"tp": 2, "zero": 3}, {"tp": 4}]),
        slow("encdec", 4, [{"tp": 2, "zero": 1}]),
        slow("odd", 4, [{"tp": 2, "zero": 3}]),
        slow("gpt", 3, [{"tp": 3}]),
        slow("uneven", 2, [{"tp": 2, "placements": CUT}]),
        ("uneven", 3, [{"tp": 3, "placements": CUT}]),
        slow("uneven", 4, [{"tp": 2, "zero": 3, "placements": CUT}]),
        slow("gpt", 4, [{"tp": 2, "cp": 2, "placements": FUSED}, {"cp": 2, "zero": 3}]),
        slow("moe", 4, [{"ep": 2, "zero": 2}, {"ep": 4}, {"tp": 2, "ep": 2}]),
    ],
)
def test_partitioned_models_train_exactly(
    name: str, world_size: int, setups: list[dict[str, Any]]
) -> None:
    want = plain(name, f64, ROWS)
    for rank, answers in enumerate(run(train, world_size, name=name, setups=setups, timeout=300)):
        for got, setup in zip(answers, setups, strict=True):
            assert_same_training(got, want, EXACT, f"rank {rank} under {setup}")


def few_rows(rank: int, world_size: int) -> Reference:
    """The sequence is divided between ranks that have all parameters."""
    model = autopar.compile(MODELS["encoder"].make().double(), strategy=fixed(cp=world_size))
    given = batches(MODELS["encoder"], range(10), 3)
    losses = train_steps(model, ADAMW(model.parameters()), MODELS["encoder"], given)
    assert model.plan is not None
    (partition,) = model.plan.partitions
    op_strategies = {
        node: op_strategy for op_strategy, nodes in partition.strategies for node in nodes
    }
    assert str(op_strategies["native_layer_norm_1"]) == "S(1), R, R -> S(1), S(1), S(1)"
    assert not partition.parameters
    return Reference(losses, whole_state(model))


def repeated(rank: int, world_size: int, level: str) -> None:
    """What ranks sent each other in the forward is sent again in the backward."""
    pair = Pair("gpt", strategy=fixed(0, level, tp=2, placements=FUSED, keep_sharded=True))
    for step in range(2):
        args, _ = batch_of("gpt", step, 8)
        for model in pair.models:
            model(*args).backward()
        pair.check_gradients()
        pair.step()
    pair.check_state()


@pytest.mark.parametrize("level", ["regather", "full", "everything"])
def test_collectives_may_be_repeated(level: str) -> None:
    run(repeated, 2, level=level)


def test_few_rows_divide_the_sequence() -> None:
    for got in run(few_rows, 2):
        assert_same_training(got, plain("encoder", f64, 3), EXACT)


# -- what a training loop does beside steps ----------------------------------------------------


def loop(rank: int, world_size: int, **options: Any) -> None:
    """Gradients accumulate and are clipped, and an evaluation in between changes nothing."""
    pair = Pair("gpt", strategy=fixed(3, placements=FUSED if "tp" in options else {}, **options))
    together = math.prod(options.values())
    assert pair.parallel.data_parallel_size == world_size // together
    assert pair.parallel.data_parallel_rank == rank // together
    for step in range(3):
        for part in range(2):
            args, _ = batch_of("gpt", 2 * step + part, 8)
            losses = [model(*args) for model in pair.models]
            close(losses[1], losses[0])
            for loss in losses:
                loss.backward()
        pair.check_gradients()
        norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in pair.models]
        close(norms[1], norms[0])
        pair.step()
        with torch.no_grad():
            for model in pair.models:
                model.eval()
            close(*(model(*batch_of("gpt", 9, 4)[0]) for model in reversed(pair.models)))
            for model in pair.models:
                model.train()
    pair.check_state()
    state = pair.plain.state_dict()
    pair.parallel.load_state_dict(state)
    close(whole_state(pair.parallel), state, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, "ep": 2}, {"cp": 2}], ids=str)
def test_loops(options: dict[str, int]) -> None:
    run(loop, 4, timeout=300, **options)


def held_back(rank: int, world_size: int) -> None:
    """Gradients inside of no_sync stay where they are until the next call, over rows alone."""
    pair = Pair("encoder", strategy=fixed(3, tp=2))
    for part in range(3):
        args, kwargs = batch_of("encoder", part, 8)
        with pair.parallel.no_sync() if part < 2 else contextlib.nullcontext():
            for model in pair.models:
                (MODELS["encoder"].loss(model(*args, **kwargs)) / 3).backward()
    pair.check_gradients()


@pytest.mark.slow
def test_gradients_are_held_back() -> None:
    run(held_back, 4)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_dropout_is_that_of_one_device(axes: dict[str, int]) -> None:
    run(draw, math.prod(axes.values()), **axes)


def draw(rank: int, world_size: int, **axes: int) -> None:
    torch.manual_seed(7 + rank)
    pair = Pair("dropout", strategy=fixed(0, **axes))
    state = torch.Generator().manual_seed(7).get_state()
    for step in range(2):
        args, _ = batch_of("dropout", step, 8)
        parallel = pair.parallel(*args)
        outside = torch.get_rng_state()
        torch.set_rng_state(state)
        want = pair.plain(*args)
        state = torch.get_rng_state()
        torch.set_rng_state(outside)
        close(parallel, want)
        for loss in (parallel, want):
            loss.backward()
        pair.check_gradients()
        pair.step()


def differ(rank: int, world_size: int) -> None:
    """One rank alone has other rows; those that share no group with it hear of it, too."""
    model = autopar.compile(MODELS["gpt"].make(), strategy=fixed(0, tp=2, cp=2))
    with pytest.raises(autopar.DisagreementError, match="different batches"):
        model(*MODELS["gpt"].batch(6, rank // 3)[0])


def test_twins_with_other_rows_are_told() -> None:
    run(differ, 4)


# -- checkpoints -------------------------------------------------------------------------------


def resume(
    rank: int,
    world_size: int,
    name: str,
    source: str | None,
    target: str,
    which: range,
    **options: Any,
) -> Reference:
    """Trains on from a checkpoint, if there is one, and writes another."""
    model = autopar.compile(MODELS[name].make().double(), strategy=fixed(**options))
    optimizer = ADAMW(model.parameters())
    if source is not None:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(parts, checkpoint_id=source)
        set_state_dict(
            model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )
    with shared_captures(name, f64):
        losses = train_steps(model, optimizer, MODELS[name], batches(MODELS[name], which, ROWS))
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    checkpoint.save(parts, checkpoint_id=target)
    return Reference(losses, whole_state(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "setups"),
    [
        (
            "encoder",
            [
                (4, {"zero": 3, "tp": 2, "placements": FUSED}),
                (2, {"zero": 3}),
                (4, {"zero": 0, "tp": 2, "ep": 2, "placements": FUSED}),
                (4, {"zero": 3, "cp": 2}),
                (2, {"zero": 1, "ep": 2}),
                (2, {"zero": 0, "tp": 2, "placements": {**FUSED, "*.mlp.*": Replicate()}}),
            ],
        ),
        ("uneven", [(3, {"tp": 3, "placements": CUT}), (1, {})]),
    ],
)
def test_checkpoints_move_between_partitions(
    name: str, setups: list[tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    want = plain(name, f64, ROWS, 3 * len(setups))
    losses: list[float] = []
    source = None
    for turn, (ranks, options) in enumerate(setups):
        target, which = str(tmp_path / str(turn)), range(3 * turn, 3 * turn + 3)
        places = {"source": source, "target": target}
        answers = run(resume, ranks, name=name, which=which, **places, **options)
        source = target
        losses += answers[0].losses
    got = Reference(losses, answers[0].state)
    assert_same_training(got, want, EXACT)
