"""What goes by level, from curves that a person can check."""

from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.core.ir.mesh_levels import Levels
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.errors import StrategyError
from autopar.planner.evaluate.hierarchical import ALWAYS_FROM, levels_of
from autopar.planner.machine import Machine
from tests.harness.models import MODELS
from tests.harness.training import fixed

FLAT, WITHIN, BETWEEN = GroupShape(4, 2), GroupShape(2, 2, 2), GroupShape(2, 1, 2)


def affine(latency_s: float, bytes_per_s: float) -> Measured:
    seconds = {size: latency_s + size / bytes_per_s for size in (2**12, 2**20, 2**27)}
    return Measured(Curve.fit({n: [s] for n, s in seconds.items()}), "measured 2026-11-22 on x", "")


def machine(within_s: float) -> Machine:
    """Four ranks on two nodes; between them a byte takes as long as ten within one."""
    times = {FLAT: affine(1e-4, 1e8), BETWEEN: affine(1e-4, 1e8), WITHIN: affine(within_s, 1e9)}
    curves = {
        CurveKey(kind, shape, "float32"): curve
        for shape, curve in times.items()
        for kind in ("all_reduce", "all_to_all")
    }
    cluster = replace(Cluster.default(4), ranks_per_node=2, curves=curves, link=None)
    return Machine(cluster, None, None, None)  # type: ignore[arg-type]


def plan(**given: Any) -> autopar.Plan:
    args, _ = MODELS["gpt"].batch(8, 0)
    return autopar.plan(MODELS["gpt"].make(), 4, example_inputs=args, strategy=fixed(**given))


def test_from_the_size_that_pays() -> None:
    """m / 1e8 against 2 w + 0.5 m / 1e8 + 2 m / 1e9 seconds: equal at m = 2 w / 3e-9 bytes."""
    base = plan()
    (own,) = levels_of(base, Strategy(), machine(within_s=1e-3), "gloo")
    assert (own.axis, own.intra_node) == ("dp", 2)
    assert dict(own.from_bytes)["all_reduce"] == 2**20  # the power of two above 0.67 MB
    assert levels_of(base, Strategy(), machine(within_s=10.0), "gloo") == ()
    assert levels_of(base, Strategy(hierarchical=False), machine(1e-3), "gloo") == ()
    assert levels_of(base, Strategy(), None, "gloo") == ()
    (always,) = levels_of(base, Strategy(hierarchical=True), machine(10.0), "gloo")
    assert {least for _, least in always.from_bytes} == {ALWAYS_FROM}


def test_compressed_sums_pay_later() -> None:
    """2 x 0.254 m / 1e8 against 2 w + 0.254 m / 1e8 + 2 m / 1e9: equal at m = 3.7 MB.

    int8's messages are 0.254 of what they stand for; those of top-k save next to nothing.
    """
    allowed = Strategy(lossy=("int8", "topk", "powersgd"))
    (own,) = levels_of(plan(), allowed, machine(within_s=1e-3), "gloo")
    assert dict(own.from_bytes) == {
        **dict(levels_of(plan(), Strategy(), machine(1e-3), "gloo")[0].from_bytes),
        "int8": 2**22,
    }
    fixed_ = Strategy(compress="topk", hierarchical=True)
    (always,) = levels_of(plan(), fixed_, machine(10.0), "gloo")
    assert dict(always.from_bytes)["topk"] == ALWAYS_FROM


def test_plans_say_so() -> None:
    hybrid = plan(zero=3, dp_shard=2)
    assert "shards over 2 neighbours, in 2 copies" in str(hybrid)
    assert hybrid.levels == (Levels("dp", 2),)
    by_level = plan(hierarchical=2)
    assert "all_gather from 256.0 KiB" in str(by_level)
    assert autopar.Plan.from_dict(by_level.to_dict()) == by_level
    assert "nothing goes by level" in str(plan(hierarchical=4))
    with pytest.raises(StrategyError, match="dp_shard=3 does not divide 4 ranks of the data"):
        plan(dp_shard=3)
