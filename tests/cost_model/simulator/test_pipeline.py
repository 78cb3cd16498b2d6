from dataclasses import replace
from itertools import pairwise

import pytest

from autopar.core.schedules import Action, orders
from autopar.cost_model.simulator.pipeline import StageCost, simulate_pipeline

EVEN = StageCost(1.0, 2.0, input_s=1.0, weight_s=1.0)


def simulated(schedule, ranks, micros, chunks=1, stage=EVEN, transfer=0.0):
    made = orders(schedule, ranks, micros, chunks)
    return simulate_pipeline(made, [stage] * (ranks * chunks), lambda nbytes, *ranks: transfer)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("ranks", "micros"), [(1, 3), (2, 1), (2, 4), (4, 4), (4, 16), (8, 5)])
def test_bubble_of_even_stages(schedule, ranks, micros):
    found = simulated(schedule, ranks, micros)
    assert found.step_s == pytest.approx(3.0 * (micros + ranks - 1))
    idle = 1 - sum(found.busy_s) / ranks / found.step_s
    assert idle == pytest.approx((ranks - 1) / (micros + ranks - 1))
    assert found.exposed_s == 0.0


@pytest.mark.parametrize(("ranks", "micros", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 16, 3)])
def test_interleaving_divides_the_bubble(ranks, micros, chunks):
    """(p - 1) / v of what one micro-batch takes on a rank: Narayanan et al. 2021, 2.2.2."""
    found = simulated("interleaved", ranks, micros, chunks)
    assert found.step_s == pytest.approx(3.0 * (micros * chunks + ranks - 1))


@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 16)])
def test_zero_bubble_fills_two_thirds(ranks, micros):
    """(p - 1)(F + I - W) is left: Qi et al. 2023, table 2."""
    found = simulated("zero_bubble", ranks, micros)
    assert found.step_s == pytest.approx(3.0 * micros + (ranks - 1))


def test_the_slowest_stage_sets_the_pace():
    stages = [StageCost(1.0, 2.0), StageCost(2.0, 4.0)]
    found = simulate_pipeline(orders("1f1b", 2, 8), stages, lambda nbytes, *ranks: 0.0)
    assert found.step_s == pytest.approx(1.0 + 8 * 6.0 + 2.0)
    assert found.busy_s == pytest.approx((24, 48))


def test_transfers_overlap_with_compute_but_not_with_each_other():
    """GPipe over two ranks: transfers that are shorter than a forward show once each way."""
    stages = [StageCost(1.0, 1.0, sent_bytes=5), StageCost(1.0, 1.0, returned_bytes=7)]
    hidden = simulate_pipeline(orders("gpipe", 2, 4), stages, lambda nbytes, *ranks: nbytes / 10)
    assert hidden.exposed_s == pytest.approx(0.5 + 0.7)
    assert hidden.transfer_s == pytest.approx(4 * (0.5 + 0.7))
    slow = simulate_pipeline(orders("gpipe", 2, 4), stages, lambda nbytes, *ranks: nbytes / 2)
    assert slow.step_s == pytest.approx((1.0 + 4 * 2.5 + 1.0) + (1.0 + 4 * 3.5 + 1.0))
    on_its_way = [e for e in slow.timeline if e.stream == "rank 1 to 0"]
    assert [e.end_s - e.start_s for e in on_its_way] == pytest.approx([3.5] * 4)
    assert all(a.end_s <= b.start_s for a, b in pairwise(on_its_way))


def test_messages_that_come_late_do_not_keep_the_link():
    """GPipe over two ranks: the first of each way shows, the others come during work."""
    stages = [StageCost(1.0, 1.0, sent_bytes=1), StageCost(1.0, 1.0, returned_bytes=1)]
    made = orders("gpipe", 2, 4)
    found = simulate_pipeline(made, stages, lambda nbytes, *ranks: 0.9, late_s=0.3)
    assert found.step_s == pytest.approx(2 * 5.0 + 2 * (0.9 + 0.3))
    assert found.transfer_s == pytest.approx(8 * 0.9)


def test_who_waits_leaves_cores_to_the_others():
    """Two ranks on one core: of one micro-batch nothing runs at once, so all is twice as fast.

    Of three, stage 1 has the core alone for 1.5 s: the last forward, and the first backward;
    stage 0 for 0.5 s at the beginning and 1 s at the end; the rest is as timed.
    """
    for micros, expected in ((1, 3.0), (3, 0.5 + 2.0 + 1.5 + 4.0 + 1.0)):
        found = simulate_pipeline(
            orders("gpipe", 2, micros), [EVEN] * 2, lambda nbytes, *ranks: 0.0, oversubscription=2.0
        )
        assert found.step_s == pytest.approx(expected)
        assert found.exposed_s == 0.0


@pytest.mark.parametrize(("oversubscription", "late"), [(1.0, 2 * 0.3), (2.0, 0.0)])
def test_a_message_is_not_late_where_a_core_is_free(oversubscription, late):
    """With one micro-batch a receiver computes alone."""
    stages = [StageCost(1.0, 1.0, sent_bytes=1), StageCost(1.0, 1.0, returned_bytes=1)]
    made = orders("gpipe", 2, 1)
    found = simulate_pipeline(
        made, stages, lambda nbytes, *ranks: 0.5, late_s=0.3, oversubscription=oversubscription
    )
    assert found.step_s == pytest.approx(4.0 / oversubscription + 2 * 0.5 + late)


def test_a_message_is_late_where_its_sender_goes_on():
    """Two ranks on one core: the sender's second forward competes with the receiver."""
    stages = [StageCost(1.0, 1.0, sent_bytes=1), StageCost(1.0, 1.0, returned_bytes=1)]

    def begin(late_s):
        found = simulate_pipeline(
            orders("gpipe", 2, 2),
            stages,
            lambda *message: 1e-9,
            late_s=late_s,
            oversubscription=2.0,
        )
        (first, *_) = (event for event in found.timeline if event.stream == "rank 1")
        return first.start_s

    assert begin(0.3) == pytest.approx(begin(0.0) + 0.3)


def test_what_happens_once_a_step():
    stages = [StageCost(1.0, 1.0, first_s=3.0, last_s=5.0)]
    assert simulate_pipeline(orders("1f1b", 1, 4), stages, lambda *message: 0.0).step_s == 8 + 3 + 5


def test_messages_of_a_stage_lie_beside_its_waits_for_others():
    """Gathers start with the step; the gradient is sent before reductions have ended."""
    plain = simulated("1f1b", 4, 4)
    found = simulated("1f1b", 4, 4, stage=replace(EVEN, first_s=1.0, last_s=2.0))
    # Only rank 0 waits for its gathers, and for its reductions, behind everybody's last backward.
    assert found.step_s == pytest.approx(plain.step_s + 1.0 + 2.0)
    assert found.hidden_s == pytest.approx((0.0, 1.0, 1.0, 1.0))
    slow = simulated("1f1b", 4, 4, stage=replace(EVEN, first_s=3.0))
    assert slow.step_s == pytest.approx(plain.step_s + 3.0)


def test_stages_of_a_rank_gather_one_after_the_other():
    stage = replace(EVEN, first_s=4.0)
    found = simulated("interleaved", 1, 1, chunks=2, stage=stage)
    assert found.step_s == pytest.approx(4.0 + 1.0 + 3.0 + 1.0 + 2 * 2.0)


def test_orders_that_wait_for_each_other():
    crossed = ((Action("B", 0, 0), Action("F", 0, 0)), (Action("F", 1, 0), Action("B", 1, 0)))
    with pytest.raises(ValueError, match="0B0, 1F0"):
        simulate_pipeline(crossed, [EVEN, EVEN], lambda nbytes, *ranks: 0.0)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
@pytest.mark.parametrize(("ranks", "micros"), [(2, 4), (4, 8), (4, 16)])
def test_a_v_fills_all_but_the_way_to_the_last_rank(schedule, ranks, micros):
    """Two stages a rank, each with half of the work: Qi et al. 2023, section 6."""
    half = StageCost(0.5, 1.0, input_s=0.5, weight_s=0.5)
    found = simulated(schedule, ranks, micros, 2, half)
    assert found.step_s == pytest.approx(3.0 * micros + 0.5 * (ranks - 1))


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
def test_the_two_stages_at_the_tip_of_a_v_send_each_other_nothing(schedule):
    found = simulated(schedule, 2, 4, 2, transfer=0.1)
    assert {e.stream for e in found.timeline if " to " in e.stream} == {
        "rank 0 to 1", "rank 1 to 0",
    }  # fmt: skip
    assert found.transfer_s == pytest.approx(2 * 2 * 4 * 0.1)  # of three borders of stages, two


def test_stages_of_a_v_gather_one_after_the_other():
    stage = StageCost(1.0, 2.0, 1.0, 1.0, first_s=3.0)
    found = simulated("zbv", 2, 1, 2, stage)
    starts = {e.name: e.start_s for e in found.timeline}
    ends = {e.name: e.end_s for e in found.timeline}
    assert ends["0F0"] == pytest.approx(3.0 + 1.0)
    assert ends["3F0"] - starts["3F0"] == pytest.approx(1.0)
