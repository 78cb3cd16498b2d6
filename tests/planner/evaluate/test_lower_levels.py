"""States, parameters and activations of GPUs in host memory, as the planner prices them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.storage import UNMEASURED
from autopar.planner import machine as measuring
from autopar.planner.evaluate.candidate import Candidate
from autopar.planner.evaluate.setup import EvaluationSetup
from autopar.planner.machine import known_machine, measure_machine
from autopar.planner.problem import PlanningProblem
from tests.planner.problems import evaluator_of, problem_of

H100 = Cluster.named("dgx-h100", nodes=1)
NBYTES = 1 << 30
COPY_S = 1e-5 + NBYTES / 49.6e9
FILE_S = UNMEASURED.write(NBYTES)


Evaluated = tuple[EvaluationSetup, Candidate, PlanningProblem]


@pytest.fixture(scope="module")
def setup() -> Evaluated:
    """A plan for eight GPUs that are not here."""
    with torch.device("meta"):
        model, rows = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.empty(16, 8)
    problem = problem_of(model, Strategy(), world_size=8, cluster=H100, comm_backend="nccl")
    problem = replace(problem, device=torch.device("meta"))
    evaluator, found = evaluator_of(model, (rows,), problem)
    return evaluator.setup, found, problem


def notes(evaluated: Evaluated, cluster: Cluster = H100, **offloaded: Any) -> list[str]:
    """Notes of a plan on lower levels of memory."""
    setup, found, _ = evaluated
    plan = replace(found.plan, notes=(), **offloaded)
    said = replace(setup, cluster=cluster).candidate(found.config, plan, found.prediction)
    return [n for n in said.plan.notes if n.startswith(("storage:", "host memory:"))]


def test_optimizers_reach_offloaded_parameters_over_the_link(setup: Evaluated) -> None:
    own, found, _ = setup
    near = found.plan
    far = replace(near, offload_parameters=True)

    def more_s(cluster: Cluster) -> float:
        on = replace(own, cluster=cluster)
        costs = [on.update_cost(plan, [NBYTES]).seconds for plan in (far, near)]
        return costs[0] - costs[1]

    assert more_s(H100) == pytest.approx(2 * COPY_S, rel=1e-3)
    assert more_s(Cluster.default(8)) == pytest.approx(FILE_S)


def test_notes_name_the_level_that_nobody_measured(setup: Evaluated) -> None:
    assert notes(setup) == []
    for used in ({"offload": ("",)}, {"offload_parameters": True}):
        (note,) = notes(setup, **used)
        assert note.startswith("host memory: modelled by 49.6 GB/s")
        assert "autopar measure times it" in note
        assert notes(setup, replace(H100, host=UNMEASURED), **used) == []
        (note,) = notes(setup, Cluster.default(8), **used)
        assert note.startswith("storage: modelled by 1 GB/s")
    assert len(notes(setup, offload=("",), offload_dir="/files")) == 2


def test_stored_states_move_to_files_or_host_memory(setup: Evaluated) -> None:
    machine = known_machine(setup[2], 1)
    assert machine.overhead.optimizer.state == (1.0, 1.0)
    largest = machine.update.curve.bytes[-1]

    def more_s(cluster: Cluster, folder: str = "") -> float:
        stored = replace(machine, cluster=cluster).with_stored_states(1 << 20, folder)
        return stored.update.curve.seconds[-1] - machine.update.curve.seconds[-1]

    copied_s, filed_s = 2 * (1e-5 + 2 * largest / 49.6e9), 2 * UNMEASURED.write(2 * largest)
    assert more_s(H100) == pytest.approx(copied_s, rel=0.01)
    assert more_s(H100, "/files") == pytest.approx(copied_s + filed_s, rel=0.01)
    assert more_s(Cluster.default(8)) == pytest.approx(filed_s)


def test_live_gpus_are_measured_for_offload(
    setup: Evaluated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(device: torch.device) -> None:
        raise InterruptedError(device.type)

    monkeypatch.setattr(measuring, "measure_host", stop)
    known: tuple[Any, ...] = H100, torch.optim.AdamW
    with pytest.raises(InterruptedError, match="cuda"):
        measure_machine([], torch.device("cuda"), *known, live=True, offload=True)
    absent = measure_machine([], torch.device("cpu"), *known, live=False, offload=True)
    assert absent.cluster.host is None
