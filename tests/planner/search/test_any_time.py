"""Searches that end early: by a limit on a fake clock, or by Ctrl-C."""

import itertools
import signal
from functools import partial
from typing import Any

import pytest
import torch

import autopar
from autopar.core.common.deadline import Deadline
from autopar.core.plan.plan import Plan
from autopar.core.plan.search_outcome import SearchOutcome
from autopar.planner.search.search_progress import SearchProgress
from autopar.session import offline
from tests.planner.blocks import GPTBlock, Stack


def planned(**more: Any) -> Plan:
    """A GPT of five blocks on two nodes of GPUs that are not here."""
    with torch.device("meta"):
        model, x = Stack(lambda: GPTBlock(256, 4), 5), torch.empty(32, 128, 256)
    cluster = autopar.Cluster.named("dgx-h100", 2)
    return autopar.plan(model, 16, example_inputs=(x,), cluster=cluster, **more)


def outcome(plan: Plan) -> SearchOutcome:
    assert plan.search is not None
    assert plan.prediction is not None
    assert 0.0 < plan.search.bound_s <= plan.prediction.step_s
    assert plan.prediction.step_s <= plan.search.baseline_s * 1.001
    assert f"verdict: {plan.search.gain(plan.prediction.step_s):.1%}"[:9] in str(plan)
    return plan.search


@pytest.mark.slow
def test_with_time_the_best_plan_is_lowered_whole() -> None:
    few = autopar.Strategy(search=("tp",), zero=0, recompute="none", micro_batches=1)
    plan = planned(strategy=few, time_limit_s=1e6)
    assert outcome(plan).complete
    assert not plan.bucket_bytes
    assert plan.buckets.reduce


def test_the_best_plan_by_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    clock = partial(Deadline, clock=lambda: float(next(ticks)))
    monkeypatch.setattr(offline, "Deadline", clock)
    plan = planned(strategy="fastest", time_limit_s=300.0)
    assert not outcome(plan).complete
    assert plan.bucket_bytes
    assert "time ran out" in str(plan)
    assert any(note.startswith("predicted by arithmetic") for note in plan.notes)


def test_the_best_plan_by_an_interruption() -> None:
    before: list[str] = []
    seen: list[str] = []

    def interrupt(search: SearchProgress) -> None:
        (seen if search.best_s else before).append(search.mesh)
        if search.best_s and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            signal.raise_signal(signal.SIGINT)

    plan = planned(strategy="fastest", time_limit_s=1e6, progress=interrupt)
    assert not outcome(plan).complete
    assert seen[0].startswith("data parallel")
    assert seen[0] == before[-1]  # told before its mesh was done


def test_without_a_plan_an_interruption_is_raised() -> None:
    def interrupt(search: SearchProgress) -> None:
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        planned(strategy="fastest", time_limit_s=1e6, progress=interrupt)
