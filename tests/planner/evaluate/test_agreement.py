"""Exchanges of records between ranks take part of a predicted step."""

from dataclasses import replace

import pytest

from autopar.capture.batch_slices import capture_of_rank
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.measurement.interference_bench import RECORD_NUMBERS
from autopar.plan.strategy import Strategy
from autopar.planner.evaluate.candidate import Candidate, default_config
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.machine import known_machine
from autopar.planner.search.build_evaluator import build_evaluator
from autopar.planner.search.pipeline_search import open_pipelines
from autopar.runtime.agreement.record import encode
from tests.harness.models import MODELS
from tests.planner.problems import problem_of

RECORD_S = 0.25


def evaluated(strategy: Strategy, record_s: float) -> tuple[Evaluator, Candidate]:
    case, cluster = MODELS["gpt"], Cluster.default(4)
    cluster = replace(cluster, slowdown=replace(cluster.slowdown, record_s=record_s))
    model, parts = case.make(), strategy.micro_batches or 1
    problem = problem_of(model, strategy, cluster=cluster)
    inputs = case.batch(8, 0)[0]
    graph = capture_of_rank(model, inputs, 0, problem.dp_size, micro_batches=parts)
    spmd = build_evaluator(problem, graph, known_machine(problem, 1))
    found: Evaluator = spmd
    if strategy.pipelined:
        found = next(open_pipelines(spmd, strategy, parts))
    return found, found.evaluate(default_config(strategy, problem.blocks, 0))


@pytest.mark.parametrize(
    "strategy",
    [Strategy(), Strategy(pp=2, micro_batches=2, schedule="1f1b")],
    ids=["spmd", "pipeline"],
)
def test_a_step_has_two_exchanges(strategy: Strategy) -> None:
    evaluator, found = evaluated(strategy, RECORD_S)
    _, without = evaluated(strategy, 0.0)
    more_s = found.step_s - without.step_s
    assert more_s == pytest.approx(2 * RECORD_S)
    assert found.prediction.exposed_s - without.prediction.exposed_s == pytest.approx(more_s)
    assert found.prediction.compute_s == pytest.approx(without.prediction.compute_s)
    cluster = evaluator.setup.cluster
    assert evaluator.seconds(found.config, [cluster]) == [pytest.approx(found.step_s)]


def test_measured_records_have_the_size_of_a_record() -> None:
    assert len(encode("calls a model", [], 0, [])) == RECORD_NUMBERS
