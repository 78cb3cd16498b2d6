"""The memory of a rank over its schedule."""

import numpy as np
import pytest

from autopar.core.ir.roles import Gradient, Parameter, StageInput, StageOutput
from autopar.core.schedules import orders
from autopar.cost_model.memory.liveness import CATEGORIES
from autopar.cost_model.simulator.pipeline_transfers import inputs_ahead, with_transfers
from autopar.planner.evaluate.stage_memory import (
    PhaseMemory,
    StageMemory,
    memory_of_rank,
    sent_bytes,
)
from tests.cost_model.sketch import Sketch, aten

SAVED, SUMMED, LARGEST = 100, 60, 40
IN_FLIGHT = CATEGORIES.index("in flight")


def column(**nbytes):
    return np.array([nbytes.get(name, 0) for name in CATEGORIES], dtype=np.int64)


def half(*columns):
    return PhaseMemory(np.linspace(0.0, 1.0, len(columns)), np.stack(columns, axis=1))


def stage(given=False, between=0, sent=(0, 0, 0), received=(0, 0)):
    """1000 bytes of parameters; a backward that turns what is saved into two gradients."""
    before = SUMMED if given else 0
    return StageMemory(
        always=column(parameters=1000),
        forward=half(column(transient=5), column(saved=SAVED)),
        backward=half(
            column(saved=SAVED, transient=30, gradients=before),
            column(saved=10, gradients=before + SUMMED),
        ),
        update=column(gradients=SUMMED, transient=7),
        saved=SAVED,
        summed=SUMMED,
        largest=LARGEST,
        reads_sums=given,
        reserved=1.5,
        split_backward=between,
        sent=sent,
        received=received,
    )


def memory_of_order(order, stages):
    """Memory of a rank that makes room for no input ahead."""
    return memory_of_rank(order, [()] * len(order), stages)


def rank_of(schedule, micro, chunks=1, given=False):
    (order, *_) = orders(schedule, 2, micro, chunks)
    stages = {s: (stage(), stage(given)) for s in range(0, 2 * chunks, 2)}
    return order, memory_of_order(order, stages)


def test_gradients_are_kept_from_the_first_backward_on():
    """At a peak of 1F1B there are two micro-batches, and what the ones before have left."""
    order, memory = rank_of("1f1b", 4)
    assert memory.peak == 1000 + 2 * SAVED + 30 + SUMMED
    assert memory.by_category["gradients"] == SUMMED
    assert memory.reserved == round(1.5 * memory.peak)
    first = [str(action) for action in order].index("0B0")
    before = [i for i, (action, _) in enumerate(memory.points) if action < first]
    assert not memory.table[CATEGORIES.index("gradients"), before].any()


def test_one_new_gradient_exists_beside_the_sums():
    _, memory = rank_of("1f1b", 8)
    assert memory.table[CATEGORIES.index("gradients")].max() == SUMMED + LARGEST
    _, memory = rank_of("1f1b", 8, given=True)
    assert memory.table[CATEGORIES.index("gradients")].max() == 2 * SUMMED


@pytest.mark.parametrize(("schedule", "saved"), [("gpipe", 8), ("1f1b", 2)])
def test_schedules_hold_so_many_micro_batches(schedule, saved):
    _, memory = rank_of(schedule, 8)
    assert memory.by_category["saved"] == saved * SAVED


def test_stages_of_a_rank_add_up_and_the_update_is_last():
    _, memory = rank_of("interleaved", 4, chunks=2)
    assert memory.table[:, -1].sum() == 2 * (1000 + SUMMED + 7)
    assert memory.by_category["parameters"] == 2000
    assert memory.by_category["saved"] < 2 * 4 * SAVED


@pytest.mark.parametrize(("rank", "waiting"), [(0, 1), (1, 2)])
def test_what_lies_between_the_parts_of_a_backward_counts(rank, waiting):
    """Later ranks leave gradients of parameters for later: they hold the more of it."""
    order, own = orders("zero_bubble", 2, 8)[rank], stage(between=3 * SAVED)
    memory = memory_of_order(order, {rank: (own, own)})
    flying = 2 - waiting  # a second micro-batch, if it is not within its backward too
    assert memory.by_category["saved"] == waiting * 3 * SAVED + flying * SAVED


def test_a_split_backward_of_one_micro_batch_ends_with_all_gradients():
    order, own = orders("zero_bubble", 2, 1)[1], stage(between=SAVED)
    memory = memory_of_order(order, {1: (own, own)})
    assert str(order[-1]) == "1W0"
    assert memory.table[CATEGORIES.index("gradients"), -2] == SUMMED


def test_what_is_sent_is_kept_until_the_schedule_ends():
    """The runtime waits for all that it sent behind the last action."""
    (order, _), own = orders("1f1b", 2, 4), stage(sent=(3, 1, 3))
    memory = memory_of_order(order, {0: (own, own)})
    flying = memory.table[IN_FLIGHT]
    assert flying[-2] == 4 * 3 + 3 * 4  # in the last backward
    assert flying[-1] == 0


def test_a_received_value_that_a_stage_passes_on_is_kept_too():
    """Values passed on and results count, of 16 bytes each; weights are always there."""
    g = Sketch()
    passed, x = (g.take(StageInput(i, "forward"), 4) for i in range(2))
    weight = g.take(Parameter("w"), 4)
    product = g.call(aten.mul.Tensor, x, weight)
    g.phase = "backward"
    tangent = g.take(StageInput(2, "backward"), 4)
    back = g.call(aten.mul.Tensor, tangent, weight)
    graph = g.give(
        {
            StageOutput(0, "forward"): passed,
            StageOutput(3, "forward"): product,
            StageOutput(4, "forward"): weight,
            StageOutput(1, "backward"): back,
            Gradient(Parameter("w")): g.call(aten.mul.Tensor, tangent, x),
        }
    )
    assert sent_bytes(graph) == (2 * 16, 0, 16)


def test_stages_of_one_rank_hand_over_what_they_compute():
    """Nothing is sent between the stages at the tip of a V: inputs wait for their use only."""
    made = orders("zbv", 2, 3, 2)[1]
    lower, upper = stage(sent=(3, 1, 3)), stage(sent=(0, 0, 5), received=(3, 0))
    ahead = inputs_ahead(with_transfers(orders("zbv", 2, 3, 2), hoisted=True)[1])
    memory = memory_of_rank(made, ahead, {1: (lower, lower), 2: (upper, upper)})
    flying = dict(
        zip((action for action, _ in memory.points), memory.table[IN_FLIGHT], strict=True)
    )
    backwards = waiting = 0
    for index, action in enumerate(made):
        waiting -= str(action).startswith("2F")
        assert flying[index] == 3 * backwards + 3 * waiting, action
        backwards += str(action).startswith("1I")
        waiting += str(action).startswith("1F")


def test_there_is_room_for_what_comes_next():
    """Stage 1 is sent 3 bytes by the one below for each forward, and nothing for backwards."""
    made, own = orders("gpipe", 2, 2), stage(received=(3, 0))
    ahead = inputs_ahead(with_transfers(made, hoisted=True)[1])
    memory = memory_of_rank(made[1], ahead, {1: (own, own)})
    flying = dict(
        zip((action for action, _ in memory.points), memory.table[IN_FLIGHT], strict=True)
    )
    assert [flying[index] for index in range(4)] == [3, 0, 0, 0]
