"""Where nothing fits: what is missing, and what is found to help."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.cli.main import main
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.core.plan.strategy import Strategy
from autopar.cost_model.cluster.cluster import Cluster
from autopar.errors import BatchError, Change, OutOfMemoryError
from autopar.planner.problem import PlanningProblem
from autopar.planner.search.oom_advice import MakePlan, plan_or_advise
from tests.harness.models import MODELS
from tests.planner.problems import problem_of

NEEDS = {"parameters": 300, "optimizer": 600, "saved": 400}


def plan_of(problem: PlanningProblem, memory: dict[str, int], step_s: float) -> Plan:
    cost = Prediction(step_s, 0.0, step_s, 0.0, 0.0, sum(memory.values()), memory=memory)
    return replace(problem.base(), prediction=cost)


def answer(problem: PlanningProblem) -> Plan:
    """Whole copies need 1300 bytes, which bounds say too low; ZeRO divides states by three."""
    strategy, memory, cap = problem.strategy, dict(NEEDS), problem.memory
    if strategy.micro_batches == 3:
        raise BatchError("odd rows")
    if strategy.zero is None:
        memory |= {"parameters": 100, "optimizer": 200}
    if strategy.recompute is None or strategy.micro_batches:
        memory["saved"] = 100
    need = sum(memory.values())
    assert cap is not None
    if need > cap:
        raise OutOfMemoryError("", need - cap - 100 if need - cap > 100 else need - cap)
    return plan_of(problem, memory, 1.0 / cap)


def answer_from_storage(problem: PlanningProblem) -> Plan:
    """As `answer`, but parameters and states leave memory if they may."""
    if not problem.strategy.stores_parameters and not problem.state_block_bytes:
        return answer(problem)
    memory = dict(NEEDS) | ({"parameters": 30} if problem.strategy.stores_parameters else {})
    memory |= {"optimizer": 60} if problem.state_block_bytes else {}
    if (need := sum(memory.values())) > (problem.memory or 0):
        raise OutOfMemoryError("", need - (problem.memory or 0))
    return plan_of(problem, memory, 1.0)


def failure(
    memory: int, strategy: Strategy, make: MakePlan = answer, device: str = "cpu"
) -> OutOfMemoryError:
    problem = problem_of(
        MODELS["gpt"].make(), strategy, memory=memory, cluster=Cluster.default(2, device)
    )
    with pytest.raises(OutOfMemoryError) as error:
        plan_or_advise(problem, make)
    return error.value


WHOLE = Strategy(zero=0, recompute="none")


def test_what_is_missing_is_what_suffices() -> None:
    """The first failure gives a bound: planning with that much more says what is missing still."""
    error = failure(1000, WHOLE)
    assert error.shortfall == 300
    assert error.memory == {**NEEDS, "gaps between them": 0}
    assert error.changes[-1] == Change("more memory on each rank", "memory=1300", 1 / 1300, 1300)
    assert "(300 bytes)" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (again.memory, again.changes, again.cap) == (error.memory, error.changes, 1000)


def test_a_plan_that_fits_when_lowered_whole_is_an_answer() -> None:
    """By arithmetic it needs 100 bytes more than whole."""

    def make(problem: PlanningProblem) -> Plan:
        short = 1300 - (problem.memory or 0)
        if short > 0:
            raise OutOfMemoryError("", short)
        return replace(plan_of(problem, NEEDS | {"saved": 300}, 1.0), memory_cap=problem.memory)

    problem = problem_of(
        MODELS["gpt"].make(), WHOLE, memory=1250, cluster=Cluster.default(2, "cpu")
    )
    found = plan_or_advise(problem, make)
    assert found.prediction is not None
    assert (found.prediction.needed_bytes, found.memory_cap) == (1200, 1250)


def test_what_helps_least_trouble_first() -> None:
    assert [change.how for change in failure(1000, WHOLE).changes] == [
        "Strategy(recompute=None)",
        "Strategy(zero=None)",
        "Strategy(micro_batches=4)",
        "memory=1300",
    ]


def test_only_what_can_help_is_planned() -> None:
    """States that exceed the cap stay so, whatever is computed again; only both are enough."""
    assert [change.how for change in failure(500, WHOLE).changes] == [
        "Strategy(zero=None, recompute=None)",
        "memory=1300",
    ]


AUTO = "Strategy(offload='auto', offload_dir='FOLDER')"
STATES = (
    "optimizer=functools.partial(autopar.OffloadedOptimizer, AdamW, folder='FOLDER', "
    "block_bytes=1048576)"
)


@pytest.mark.parametrize(
    ("memory", "hows"), [(1100, [AUTO, STATES]), (800, [STATES]), (500, [f"{STATES}; {AUTO}"])]
)
def test_storage_is_proposed_for_parameters_and_states(memory: int, hows: list[str]) -> None:
    changes = failure(memory, replace(WHOLE, recompute="full"), answer_from_storage).changes
    assert [change.how for change in changes if "FOLDER" in change.how] == hows
    assert "states of the optimizer on storage (600 B)" in str([each.what for each in changes])


def test_gpus_have_host_memory_for_them() -> None:
    changes = failure(1100, replace(WHOLE, recompute="full"), answer_from_storage, "cuda").changes
    hows = [change.how for change in changes]
    assert hows[0] == "Strategy(offload='auto')"
    assert STATES.replace("folder='FOLDER', ", "") in hows
    assert "parameters in host memory" in changes[0].what


def test_the_cap_of_a_device_is_that_of_the_failure() -> None:
    """Live ranks that were given no cap know it only when the machine is measured."""
    problem = problem_of(MODELS["gpt"].make(), WHOLE)

    def on_device(own: PlanningProblem) -> Plan:
        if own.memory is not None:
            return answer(own)
        raise OutOfMemoryError("", 300, NEEDS, cap=1000)

    with pytest.raises(OutOfMemoryError) as error:
        plan_or_advise(problem, on_device)
    assert error.value.changes[-1].needed_bytes == 1300


def test_a_plan_that_fits_is_the_answer() -> None:
    problem = problem_of(MODELS["gpt"].make(), WHOLE, memory=1300)
    assert plan_or_advise(problem, answer) == answer(problem)


MAKE = """
import torch
from tests.planner.blocks import GPTBlock, Stack
def make():
    with torch.device("meta"):
        return Stack(lambda: GPTBlock({width}, 4), 1), (torch.empty(4, {length}, {width}),)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "length", "memory", "helps"),
    [
        (1024, 64, "185MiB", ["world_size="]),
        (256, 4096, "300MiB", ["micro_batches=2", "1/2 of them"]),
    ],
)
def test_the_command_line_says_what_helps(
    width: int,
    length: int,
    memory: str,
    helps: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A block of one GPU that is not here: first its states are too large, then activations."""
    script = tmp_path / "make.py"
    script.write_text(MAKE.replace("{length}", str(length)).replace("{width}", str(width)))
    more = ["--world-size", "1", "--cluster", "dgx-h100", "--search", "", "--precision", "fp32"]
    assert main(["plan", str(script), *more, "--memory", memory]) == 3
    text = capsys.readouterr().err
    print(text)
    for what in ("nothing fits under", "Peak memory of the smallest plan", "more memory", *helps):
        assert what in text
