from collections import Counter
from itertools import product

import pytest

from autopar.cost_model.simulator.schedules import (
    Action,
    in_flight,
    orders,
    split_orders,
)

SIZES = [*product((1, 2, 3, 4, 8), (1, 2, 3, 4, 5, 7, 13, 16))]


def needs(action, stages):
    """What must have happened before, on this rank or another."""
    kind, stage, micro = action.kind, action.stage, action.micro
    if kind == "F":
        return {Action("F", stage - 1, micro)} if stage else set()
    if kind == "W":
        return {Action("I", stage, micro)}
    own = {Action("F", stage, micro)}
    return own | ({Action(kind, stage + 1, micro)} if stage + 1 < stages else set())


def left_over(made, stages):
    """What is never reached when each rank does its actions in order; nothing is right."""
    queues = [list(reversed(order)) for order in made]
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and needs(queue[-1], stages) <= done:
                done.add(queue.pop())
                moved = True
    return [queue[-1] for queue in queues if queue]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("zero_bubble", 1)]
    + [("interleaved", v) for v in (2, 3, 4)],
)
def test_every_order_ends_and_does_all(schedule, chunks):
    kinds = "FIW" if schedule == "zero_bubble" else "FB"
    for ranks, micros in SIZES:
        made, stages = orders(schedule, ranks, micros, chunks), ranks * chunks
        every = {Action(k, s, m) for k in kinds for s in range(stages) for m in range(micros)}
        assert Counter(a for order in made for a in order) == Counter(every)
        assert all(a.stage % ranks == rank for rank, order in enumerate(made) for a in order)
        assert not left_over(made, stages), (ranks, micros)


def test_1f1b_holds_what_is_under_way():
    made = orders("1f1b", 4, 8)
    assert [in_flight(order, rank) for rank, order in enumerate(made)] == [4, 3, 2, 1]
    assert " ".join(map(str, made[2])) == (
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7"
    )


def test_zero_bubble_holds_no_more_than_1f1b_does_at_most():
    made = orders("zero_bubble", 4, 8)
    assert [in_flight(order, rank) for rank, order in enumerate(made)] == [4, 4, 4, 4]
    assert " ".join(map(str, made[3][:14])) == (
        "3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5"
    )


def test_interleaved_is_megatrons_where_micro_batches_are_even():
    first = orders("interleaved", 2, 4, 2)[0]
    assert " ".join(map(str, first)) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    )


def test_forwards_alone_and_gpipe_in_two():
    forwards, backwards = split_orders(2, 3, 2)
    assert {a.kind for order in forwards for a in order} == {"F"}
    assert " ".join(map(str, backwards[1])) == "3B0 3B1 3B2 1B0 1B1 1B2"
    assert in_flight(orders("gpipe", 2, 3, 2)[0], 2) == 3


def test_what_is_no_schedule():
    with pytest.raises(ValueError, match="'dualpipe' is no schedule"):
        orders("dualpipe", 2, 2)
    with pytest.raises(ValueError, match="one stage on a rank"):
        orders("1f1b", 2, 2, 2)
