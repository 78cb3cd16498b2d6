"""Models divided over ranks of several nodes train as on one device, with messages by level."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

import autopar
from autopar.core.ir.placement import Shard
from autopar.planner.evaluate import hierarchical
from autopar.session.inspect import program_text
from tests.harness.architectures import ARCHITECTURES, EXPERTS
from tests.harness.models import MODELS, Case
from tests.harness.reference import Reference, batches, reference, train_steps
from tests.harness.training import ADAMW, assert_same_training, fixed, whole_state
from tests.harness.worlds import run

EXACT, ROWS, STEPS = 1e-9, 12, 3
f64 = torch.float64
ALL_SIZES = patch.object(hierarchical, "ALWAYS_FROM", 0)
"""Messages of any size go by level; those of these models are small."""


APART = {"placements": {"*.experts.*": {"ep": Shard(0)}}, "keep_sharded": True}
"""Whole experts on each rank, which computes the tokens that are sent to them."""

LLAMA = ARCHITECTURES["llama"]
GROUPED = replace(LLAMA, settings={**LLAMA.settings, "num_key_value_heads": 2})


def case_of(name: str) -> Case:
    return MODELS[name] if name in MODELS else EXPERTS[name].case


def train(
    rank: int, world_size: int, name: str, setups: list[dict[str, Any]]
) -> list[tuple[Reference, str]]:
    """Losses and final state under each setup, and the axes whose messages go by level."""
    answers, case = [], case_of(name)
    for options in setups:
        with ALL_SIZES:
            model = autopar.compile(case.make().double(), strategy=fixed(**options), fallback=False)
            given = batches(case, range(STEPS), ROWS, f64)
            losses = train_steps(model, ADAMW(model.parameters()), case, given)
        assert model.plan is not None
        by_level = " ".join(own.axis for own in model.plan.levels if own.from_bytes)
        answers.append((Reference(losses, whole_state(model)), by_level))
    return answers


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def stages(*zero: int, **options: Any) -> list[dict[str, Any]]:
    """A strategy on nodes of two ranks, under some ZeRO stages."""
    return [{"zero": stage, "hierarchical": 2, **options} for stage in zero]


@pytest.mark.parametrize(
    ("name", "ranks", "over", "setups"),
    [
        ("moe", 4, "ep", stages(3, ep=4)),
        slow("moe", 4, "ep", stages(0, 1, ep=4)),
        slow("gpt", 4, "cp", stages(1, 3, cp=4)),
        slow("moe", 4, "cp", stages(0, 1, 3, cp=4)),
        slow("moe", 4, "", stages(0, 1, 3, ep=2, cp=2)),
        slow("moe", 8, "ep", stages(0, 1, 3, ep=4)),
        slow("moe", 8, "ep", stages(0, 1, 3, ep=4, tp=2, hierarchical=4)),
        slow("moe", 8, "", stages(0, 3, ep=4, tp=2)),
        # ZeRO over cp, and a dim that operators read divided along ep
        slow("moe", 6, "", stages(1, cp=3, ep=2)),
        slow("deepseek_v3", 8, "", stages(2, cp=4, ep=2)),
        slow("mixtral", 4, "ep", stages(0, 3, ep=4, **APART)),
        slow("deepseek_v3", 4, "ep", stages(0, 3, ep=4, **APART)),
        slow("qwen3_moe", 4, "cp", stages(3, cp=4)),
        slow("mixtral", 8, "ep", stages(1, 3, ep=4, tp=2, hierarchical=4, **APART)),
    ],
)
def test_axes_over_nodes_train_exactly(
    name: str, ranks: int, over: str, setups: list[dict[str, Any]]
) -> None:
    want = reference(case_of(name), STEPS, f64, ADAMW, ROWS)
    for rank, answers in enumerate(run(train, ranks, name=name, setups=setups, timeout=300)):
        for (got, by_level), setup in zip(answers, setups, strict=True):
            assert by_level == over, setup
            assert_same_training(got, want, EXACT, f"rank {rank} under {setup}")


def test_messages_between_nodes_are_those_of_one_place_on_each() -> None:
    args, _ = MODELS["moe"].batch(ROWS, 0)
    with ALL_SIZES:
        strategy = fixed(hierarchical=2, ep=4)
        plan = autopar.plan(MODELS["moe"].make(), 4, example_inputs=args, strategy=strategy)
    text = program_text(MODELS["moe"].make(), args, plan=plan)
    assert "ep.inter_node)" in text
    assert "ep.intra_node)" in text
    assert " ep)" not in text


def one_row(rank: int, world_size: int, **options: Any) -> Reference:
    case = GROUPED.case
    with ALL_SIZES:
        strategy = fixed(3, hierarchical=2, **options)
        model = autopar.compile(case.make().double(), strategy=strategy, fallback=False)
        given = batches(case, range(STEPS), 1, f64)
        losses = train_steps(model, ADAMW(model.parameters()), case, given)
    assert model.plan is not None
    texts = [str(own) for part in model.plan.partitions for own, _ in part.strategies]
    assert any("attention_query_heads" in text for text in texts)
    return Reference(losses, whole_state(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"), [(4, {"cp": 4}), (6, {"cp": 3, "tp": 2}), (6, {"cp": 6})], ids=str
)
def test_one_row_is_divided_over_more_ranks_than_key_heads(
    ranks: int, options: dict[str, int]
) -> None:
    """12 query heads share 2 or, over tp, 1 of 2 key heads; attention is causal."""
    want = reference(GROUPED.case, STEPS, f64, ADAMW, 1)
    for got in run(one_row, ranks, **options):
        assert_same_training(got, want, EXACT, options)


def test_experts_stay_apart_and_the_plan_says_what_it_assumes() -> None:
    case = EXPERTS["mixtral"]
    plans = [
        autopar.plan(case.make(), 4, example_inputs=case.batch(ROWS), strategy=fixed(**options))
        for options in ({"ep": 4, **APART}, {"ep": 4, "route_experts": False})
    ]
    (apart,), (free,) = (plan.partitions for plan in plans)
    products = [str(own) for own, _ in apart.strategies if own.lowering == "experts"]
    assert products == ["E(0), S(0), E(0) -> E(0) by experts"]
    assert "busiest rank of ep is priced with 1.0 times an even share" in " ".join(plans[0].notes)
    # Of gathered tokens, the fewest bytes are rows and columns, which no router decides over.
    assert not any(own.lowering == "experts" for own, _ in free.strategies)
    assert not any("busiest" in note for note in plans[1].notes)
