from collections import Counter
from itertools import product

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.core.schedules import (
    ENDS,
    Action,
    in_flight,
    orders,
    ranks_in,
    split_orders,
    stage_ranks,
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
    + [("interleaved", v) for v in (2, 3, 4)]
    + [("zbv", 2)],
)
def test_every_order_ends_and_does_all(schedule, chunks):
    kinds = "FIW" if schedule in ("zero_bubble", "zbv") else "FB"
    for ranks, micros in SIZES:
        made, stages = orders(schedule, ranks, micros, chunks), ranks * chunks
        every = {Action(k, s, m) for k in kinds for s in range(stages) for m in range(micros)}
        assert Counter(a for order in made for a in order) == Counter(every)
        places = stage_ranks(schedule, ranks, chunks)
        assert all(places[a.stage] == rank for rank, order in enumerate(made) for a in order)
        assert ranks_in(made) == places
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


def test_dualpipe_v_computes_each_backward_once_whole_or_in_two():
    for ranks, micros in SIZES:
        made = orders("dualpipe_v", ranks, micros, 2)
        every = {Action(k, s, m) for k in "FIW" for s in range(2 * ranks) for m in range(micros)}
        halves = [
            [
                Action(kind, a.stage, a.micro)
                for a in order
                for kind in ("IW" if a.kind == "B" else a.kind)
            ]
            for order in made
        ]
        assert Counter(a for order in halves for a in order) == Counter(every)
        assert not left_over(halves, 2 * ranks), (ranks, micros)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
def test_weight_gradients_of_a_stage_come_in_the_order_of_micro_batches(schedule):
    """The last one reduces gradients, and the first one begins their sum."""
    for ranks, micros in SIZES:
        for order in orders(schedule, ranks, micros, 2):
            for stage in {a.stage for a in order}:
                done = [a.micro for a in order if a.stage == stage and a.kind in ENDS]
                assert done == [*range(micros)]


def test_both_ends_of_a_v_are_on_the_first_rank():
    assert stage_ranks("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert stage_ranks("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    first = orders("zbv", 2, 4, 2)[0]
    assert " ".join(map(str, first)) == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 "
        "0I2 0W2 0I3 0W3"
    )


def test_a_v_holds_one_micro_batch_of_a_stage_more_than_1f1b_at_most():
    """A stage of 1F1B is two of a V."""
    for ranks in (2, 4, 8):
        for order in orders("zbv", ranks, 4 * ranks, 2):
            assert sum(in_flight(order, s) for s in {a.stage for a in order}) <= 2 * ranks + 1


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
def test_the_orders_of_a_v_are_torchs(schedule):
    """torch makes them for stages of processes; these have none."""
    kinds = {"zbv": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}
    for ranks, micros in [(2, 4), (4, 8), (4, 13)]:
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        try:
            stages = [
                PipelineStage(nn.Identity(), s, 2 * ranks, torch.device("cpu"))
                for s in (0, 2 * ranks - 1)
            ]
            made = get_schedule_class(kinds[schedule])(stages, micros)
        finally:
            dist.destroy_process_group()
        for rank, order in enumerate(orders(schedule, ranks, micros, 2)):
            flat = [p for a in made.pipeline_order[rank] if a for p in a.sub_actions or (a,)]
            assert [str(a) for a in order] == [str(a) for a in flat]


def test_forwards_alone_and_gpipe_in_two():
    forwards, backwards = split_orders("gpipe", 2, 3, 2)
    assert {a.kind for order in forwards for a in order} == {"F"}
    assert " ".join(map(str, backwards[1])) == "3B0 3B1 3B2 1B0 1B1 1B2"
    assert in_flight(orders("gpipe", 2, 3, 2)[0], 2) == 3
    _, backwards = split_orders("zbv", 2, 2, 2)
    assert " ".join(map(str, backwards[0])) == "3B0 3B1 0B0 0B1"


def test_what_is_no_schedule():
    with pytest.raises(ValueError, match="'dualpipe' is no schedule"):
        orders("dualpipe", 2, 2)
    with pytest.raises(ValueError, match="one stage on a rank"):
        orders("1f1b", 2, 2, 2)
    with pytest.raises(ValueError, match="two stages on a rank"):
        orders("zbv", 2, 2)
