"""`autopar profile`: what ranks record, what is made of it, and what it names."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

import autopar
from autopar.cli.profile import show, trace
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.planner import machine
from autopar.session.profiler.report import Message, Profile, Side, find
from tests.harness.worlds import run

STEPS = 2


def _train(rank: int, world_size: int, *, folder: str) -> int:
    machine._QUICK_S, kept = 0.1, machine._QUICK_S
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        model = autopar.compile(model, strategy=autopar.Strategy(zero=3), fallback=False)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(STEPS + 5):
            model(torch.rand(4, 8)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        machine._QUICK_S = kept
    return len(list(Path(folder).glob("rank*.json")))


@pytest.mark.slow
def test_every_rank_records_a_step_and_predicts_it(tmp_path):
    environment = {"AUTOPAR_PROFILE": str(tmp_path), "AUTOPAR_PROFILE_STEPS": str(STEPS)}
    environment["AUTOPAR_CACHE"] = str(tmp_path / "cache")
    environment["AUTOPAR_PROFILE_REFIT"] = str(tmp_path / "refit.json")
    run(_train, 2, folder=str(tmp_path), env=environment)
    profiles = [Profile.load(tmp_path / f"rank{rank}.json") for rank in range(2)]
    for rank, profile in enumerate(profiles):
        assert profile.rank == rank
        assert len(profile.steps_s) == STEPS
        assert set(profile.measured.operators) <= set(profile.predicted.operators)
        assert set(profile.measured.waits) == {m.collective for m in profile.messages}
        inside = sum(profile.measured.operators.values()) + sum(profile.measured.waits.values())
        assert 0 < inside < max(profile.steps_s)
        assert profile.kinds["measured"] > 0
    rows = trace(profiles)["traceEvents"]
    shown = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert shown == ["predicted", "measured, rank 0", "measured, rank 1"]
    json.dumps(rows)
    console = Console(record=True, width=120)
    show(profiles, console)
    told = console.export_text()
    assert "Worst bottleneck" in told or "Nothing" in told
    found = profiles[0].again
    assert found is not None
    assert found == profiles[1].again
    assert found.operators > 0
    assert "would" in told
    assert "refit.json" in told
    kept = Cluster.load(tmp_path / "refit.json")
    refitted = any(" in steps of Sequential" in e.provenance for e in kept.curves.values())
    assert refitted == bool(found.collectives)  # none has a known end where ranks are out of step


def profile(**waits: float) -> Profile:
    """A step of one second with such waits, of 0.3 s outside, 0.2 s of it the optimizer's."""
    messages = (
        Message("large", "all_reduce", 10**7, 0.3, 1e-3, "measured"),
        Message("small", "all_gather", 10, 1.1e-3, 1e-3, "measured"),
    )
    events = tuple(Event(f"wait_{k}", COMPUTE, 0.0, s, "wait") for k, s in waits.items())
    side = Side(1.0, {"aten.mm.default": 0.5}, {}, 0.3, events)
    wait_of = {f"wait_{name}": name for name in ("large", "small")}
    faster = {"collectives": 0.8, "operators": 0.7}
    predicted = replace(side, outside_s=0.2)
    return Profile(0, (1.0,), side, predicted, messages, wait_of, faster, {}, "here")


@pytest.mark.parametrize(
    ("waits", "first"),
    [
        ({"large": 0.2}, "exposed collectives"),
        ({"small": 0.2, "large": 0.06}, "many small messages"),
        ({"large": 0.01}, "an idle device"),
    ],
)
def test_the_worst_bottleneck_is_named(waits, first):
    found = find([profile(**waits)])
    assert found[0].name == first
    assert all(word in found[0].why for word in ("measured", "ms"))
    assert found[0].advice


def test_a_link_that_is_busy_for_most_of_a_step_is_saturated():
    busy = profile(large=0.4)
    busy = replace(busy, messages=(replace(busy.messages[0], seconds=0.9), busy.messages[1]))
    assert find([busy])[0].name == "a saturated link"
    assert "save 200 ms (modelled)" in find([busy])[0].why


def test_waiting_for_a_late_rank_is_no_fault_of_the_collectives():
    early, late = profile(large=0.3), profile(large=0.02)
    found = find([early, late])
    assert [item.name for item in found] == ["ranks out of step", "an idle device"]
    assert found[0].seconds == pytest.approx(0.14)


def test_nothing_is_named_where_nothing_holds_up():
    side = profile().measured
    fine = replace(profile(large=0.01), measured=replace(side, outside_s=0.21))
    assert find([fine]) == []
