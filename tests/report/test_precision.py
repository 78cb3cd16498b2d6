"""The line of a plan on dtypes, and what `autopar.plan` assumes of them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.core.plan.plan import Plan
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.report.precision import precision_line
from tests.planner.problems import problem_of


def base(model: nn.Module, optimizer: Any = torch.optim.AdamW, **fields: Any) -> Plan:
    problem = replace(problem_of(model, Strategy()), optimizer=optimizer)
    return replace(problem.base(), **fields)


SHARDED = {"mesh": (("dp", 4),), "world_size": 4, "zero_stages": (("", 3),)}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            base(nn.Linear(8, 8), precision="bfloat16", **SHARDED),
            "params fp32, compute and gather bf16, reduce fp32, AdamW fp32: "
            "16 B per parameter + 2 B gathered",
        ),
        (
            base(nn.Linear(8, 8), torch.optim.SGD, reduce_precision="bfloat16", **SHARDED),
            "params fp32, compute and gather fp32, reduce bf16, SGD fp32: "
            "8 B per parameter + 4 B gathered",
        ),
        (
            base(nn.Linear(8, 8).bfloat16()),
            "params bf16 (no fp32 copy: small updates are rounded away), compute bf16, "
            "reduce bf16, AdamW bf16: 8 B per parameter",
        ),
    ],
)
def test_the_line_is_computed_from_plan_and_optimizer(plan: Plan, text: str) -> None:
    assert list(precision_line(plan)) == [text]
    assert text in str(plan)
    assert Plan.from_dict(plan.to_dict()).parameter_dtypes == plan.parameter_dtypes


def test_plans_without_dtypes_say_nothing() -> None:
    document = base(nn.Linear(8, 8)).to_dict()
    for name in ("parameter_dtypes", "reduce_precision"):
        del document[name]
    assert list(precision_line(Plan.from_dict(document))) == []


@pytest.mark.parametrize(
    ("cluster", "precision", "assumed", "note"),
    [
        ("dgx-h100", None, "bfloat16", "bf16 autocast with fp32 parameters is assumed"),
        ("dgx-h100", "fp32", None, "leaves the tensor cores of H100 80GB HBM3 idle (989 against"),
        ("dgx-h100", "fp16", "float16", ""),
        (None, None, None, ""),
    ],
)
def test_clusters_with_tensor_cores_are_planned_for_bf16(
    cluster: str | None, precision: str | None, assumed: str | None, note: str
) -> None:
    plan = autopar.plan(
        nn.Linear(64, 64, device="meta"),
        8,
        example_inputs=(torch.empty(16, 64, device="meta"),),
        strategy=autopar.Strategy(zero=0, recompute="none", prefetch=1),
        cluster=Cluster.named(cluster, 1) if cluster else None,
        precision=precision,
    )
    assert plan.precision == assumed
    assert any(note in text for text in plan.notes) or not note
    assert note or not any("bf16" in text for text in plan.notes)
