"""Relations between predictions of plans, over random models, meshes and configurations."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from autopar.core.plan.prediction import Prediction
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.simulator.bound import least_seconds
from autopar.planner.accounts import account_notes
from autopar.planner.evaluate.bandwidth_sweep import ScaledBandwidth
from autopar.planner.evaluate.evaluator import SpmdEvaluator
from tests.metamorphic.questions import Question, evaluator_of

MESHES: dict[str, Question] = {
    "data": Question.drawn(0),
    "data of llama": Question.drawn(3, kind="llama", width=64, length=32),
    "tensors": Question.drawn(1, kind="gpt", axes=(("tp", 2),)),
    "sequences": Question.drawn(2, kind="gpt", axes=(("cp", 2),)),
    "experts": Question.drawn(4, kind="experts", axes=(("ep", 2),)),
    "stages": Question.drawn(
        5, axes=(("pp", 2), ("micro_batches", 2), ("schedule", "1f1b")), kind="t5"
    ),
}
STAGES, LEVELS = (0, 1, 2, 3), ("none", "selective", "full")
ROUNDING = 1 + 1e-9

each_mesh = pytest.mark.parametrize("mesh", MESHES)
spmd_meshes = pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh != "stages"])
data_meshes = pytest.mark.parametrize("mesh", ["data", "data of llama"])


def cost(mesh: str, **choices: Any) -> Prediction:
    return MESHES[mesh].candidate(**choices).prediction


def states(found: Prediction) -> int:
    """Bytes of parameters and of the optimizer's states."""
    return found.memory["parameters"] + found.memory["optimizer"]


# -- accounts --------------------------------------------------------------------------------------


@each_mesh
def test_the_parts_of_a_step_make_it_up(mesh: str) -> None:
    """Compute, waits, the optimizer's step and idle time, at every ZeRO stage."""
    for stage, level in product((0, 3), LEVELS):
        found = cost(mesh, zero=stage, recompute=level)
        parts = found.compute_s + found.exposed_s + found.update_s
        assert parts <= found.step_s * ROUNDING
        assert parts + found.idle_s == pytest.approx(found.step_s)
        assert found.exposed_s <= found.communication_s + 1e-12 or mesh == "stages"


@each_mesh
def test_memory_by_kind_makes_up_the_peak(mesh: str) -> None:
    """At the peak of the fullest rank, whose allocator has reserved as much."""
    for stage, level in product((0, 3), LEVELS):
        found = cost(mesh, zero=stage, recompute=level)
        assert sum(found.memory.values()) == found.peak_bytes <= found.reserved_bytes
        assert max((held for _, held in found.memory_curve), default=found.peak_bytes) == (
            found.peak_bytes
        )


@each_mesh
def test_a_rank_holds_its_shards(mesh: str) -> None:
    """No account of a plan says that parts exceed the whole, or a rank less than its shards."""
    for stage in STAGES:
        candidate = MESHES[mesh].candidate(zero=stage)
        assert not list(account_notes(candidate.plan, candidate.prediction))


@spmd_meshes
def test_a_step_is_no_shorter_than_its_bound(mesh: str) -> None:
    """The bound over all schedules lies between compute alone and the simulated step."""
    evaluator = evaluator_of(MESHES[mesh])
    assert isinstance(evaluator, SpmdEvaluator)
    for stage in (0, 3):
        config, setup = MESHES[mesh].config(zero=stage), evaluator.setup
        found = cost(mesh, zero=stage)
        least = least_seconds(evaluator.lowered(config), setup.cluster, setup.operators)
        assert least <= (found.step_s - found.update_s) * ROUNDING


@each_mesh
def test_a_step_over_the_links_that_there_are_is_the_prediction(mesh: str) -> None:
    """Asked again, by another way, an evaluator answers alike."""
    question = MESHES[mesh]
    evaluator, config = evaluator_of(question), question.config(zero=3)
    again = evaluator.seconds(config, [Cluster.named(question.cluster, 1)])
    assert again == [pytest.approx(question.candidate(zero=3).step_s, rel=1e-9)]


# -- more of something is never slower -------------------------------------------------------------


@each_mesh
def test_more_bandwidth_is_never_slower(mesh: str) -> None:
    """Links of half, equal, twice and eight times the rate."""
    question = MESHES[mesh]
    evaluator = evaluator_of(question)
    clusters = [ScaledBandwidth.of(evaluator.setup.cluster, rate) for rate in (0.5, 1.0, 2.0, 8.0)]
    for stage in (0, 3):
        steps = evaluator.seconds(question.config(zero=stage), clusters)
        assert all(fast <= slow * ROUNDING for slow, fast in pairwise(steps))


@data_meshes
def test_later_gpus_compute_no_more_slowly(mesh: str) -> None:
    """A100, H100 and B200 on the same program, whose tensors take the same bytes."""
    found = [
        replace(MESHES[mesh], cluster=name).candidate().prediction
        for name in ("dgx-a100", "dgx-h100", "dgx-b200")
    ]
    for slow, fast in pairwise(found):
        assert fast.compute_s <= slow.compute_s * ROUNDING
        assert fast.update_s <= slow.update_s * ROUNDING
        assert fast.memory["parameters"] == slow.memory["parameters"]


@data_meshes
def test_more_gpus_hold_no_more_each(mesh: str) -> None:
    """One, two and four nodes share one batch under ZeRO 3."""
    found = [
        replace(MESHES[mesh], cluster="dgx-a100", nodes=nodes, rows=32).candidate(zero=3).prediction
        for nodes in (1, 2, 4)
    ]
    for few, many in pairwise(found):
        assert states(many) <= states(few)
        assert many.memory["saved"] <= few.memory["saved"]
        assert many.compute_s <= few.compute_s * 1.01


# -- memory ----------------------------------------------------------------------------------------


@each_mesh
def test_a_higher_zero_stage_keeps_fewer_states(mesh: str) -> None:
    """Stages 0 to 3, whose parameters and optimizer states only ever shrink."""
    for fewer, more in pairwise(cost(mesh, zero=stage) for stage in STAGES):
        assert more.memory["parameters"] <= fewer.memory["parameters"]
        assert more.memory["optimizer"] <= fewer.memory["optimizer"]


def saved_bytes(question: Question, level: str) -> int:
    """Bytes kept at the end of the forward."""
    evaluator = evaluator_of(question)
    assert isinstance(evaluator, SpmdEvaluator)
    graph = evaluator.lowered(question.config(recompute=level))
    memory = evaluator.setup.simulate(graph).memory
    return int(memory.table[:, memory.forward - 1].sum())


@spmd_meshes
def test_recomputation_keeps_fewer_activations_for_more_work(mesh: str) -> None:
    """At the end of the forward; a small model's peak may lie in the backward, which does more."""
    for less, more in pairwise(LEVELS):
        kept = [saved_bytes(MESHES[mesh], level) for level in (less, more)]
        assert kept[1] <= kept[0]
        assert cost(mesh, recompute=more).compute_s >= cost(mesh, recompute=less).compute_s


@data_meshes
def test_offloading_takes_bytes_from_the_device(mesh: str) -> None:
    """Activations in host memory; the step gets no shorter."""
    question = MESHES[mesh]
    near = question.candidate().prediction
    far = question.candidate(offload=question.problem.blocks).prediction
    assert far.memory["saved"] <= near.memory["saved"]
    assert far.step_s >= near.step_s / ROUNDING
    assert far.host_bytes >= near.host_bytes


def test_more_micro_batches_keep_fewer_activations() -> None:
    """Micro-batches of one batch are smaller, and each rank waits less."""
    base = replace(MESHES["stages"], rows=32)
    saved, bubbles = [], []
    for count in (1, 2, 4):
        axes = (("pp", 2), ("micro_batches", count), ("schedule", "1f1b"))
        found = replace(base, axes=axes).candidate().prediction
        saved.append(max(stage.saved_bytes * stage.in_flight for stage in found.stages))
        bubbles.append(found.bubble)
    assert saved == sorted(saved, reverse=True)
    assert bubbles == sorted(bubbles, reverse=True)


# -- names and orders ------------------------------------------------------------------------------


@data_meshes
def test_names_change_nothing(mesh: str) -> None:
    """Blocks under another name, of another length."""
    one, other = cost(mesh, zero=3), replace(MESHES[mesh], name="a_layer").candidate(zero=3)
    assert other.prediction.step_s == pytest.approx(one.step_s, rel=1e-9)
    assert other.prediction.memory == one.memory


@data_meshes
def test_the_order_of_registration_changes_nothing(mesh: str) -> None:
    """A model whose last module is registered first computes as long, and sends as much."""
    one, other = (replace(MESHES[mesh], head_first=first).candidate(zero=3) for first in (0, 1))
    assert other.prediction.compute_s == pytest.approx(one.prediction.compute_s, rel=1e-9)
    assert states(other.prediction) == states(one.prediction)
    assert other.plan.sent_bytes == one.plan.sent_bytes
