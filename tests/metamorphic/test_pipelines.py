"""Relations between simulated pipelines, over random stages, messages and schedules."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from autopar.core.schedules import SPLIT_SCHEDULES, V_SCHEDULES, Orders, in_flight, orders
from autopar.cost_model.simulator.pipeline import (
    PipelineSimulation,
    StageCost,
    simulate_pipeline,
)
from autopar.cost_model.simulator.streams import COMPUTE

ROUNDING = 1e-9
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipe_v")

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


@dataclass(frozen=True)
class Pipe:
    """A pipeline to simulate: schedule, stages and seconds of a byte on a link."""

    schedule: str
    ranks: int
    micro_batches: int
    chunks: int
    stages: tuple[StageCost, ...]
    byte_s: float

    @property
    def orders(self) -> Orders:
        return orders(self.schedule, self.ranks, self.micro_batches, self.chunks)

    def run(self) -> PipelineSimulation:
        return simulate_pipeline(
            self.orders, self.stages, lambda nbytes, *ranks: nbytes * self.byte_s
        )

    def times(self, factor: float) -> "Pipe":
        """The pipeline on ranks and links that take `factor` times as long."""
        stages = tuple(stage.at_pace(factor) for stage in self.stages)
        return replace(self, stages=stages, byte_s=factor * self.byte_s)


def pipes(schedule: str, count: int = 40) -> Iterator[Pipe]:
    """Random pipelines of a schedule."""
    draw = random.Random(schedule)
    for _ in range(count):
        ranks = draw.randint(2, 5)
        chunks = 2 if schedule in V_SCHEDULES else 1
        chunks = draw.randint(2, 3) if schedule == "interleaved" else chunks
        stages = []
        for _ in range(ranks * chunks):
            given, weight = draw.uniform(0.5, 2), draw.uniform(0.5, 2)
            backward_s = given + weight
            sizes = {"sent_bytes": draw.randint(1, 9), "returned_bytes": draw.randint(1, 9)}
            stages.append(StageCost(draw.uniform(0.5, 2), backward_s, given, weight, **sizes))
        micro_batches = draw.randint(2 * ranks, 3 * ranks)  # V schedules need so many
        yield Pipe(
            schedule, ranks, micro_batches, chunks, tuple(stages), draw.choice([0, 0.05, 0.3])
        )


@each_schedule
def test_a_schedule_has_every_action_once(schedule: str) -> None:
    """Each stage runs each micro-batch forward and backward, and no other."""
    for pipe in pipes(schedule):
        actions = [action for order in pipe.orders for action in order]
        assert len(actions) == len(set(actions))
        every = {(s, m) for s in range(len(pipe.stages)) for m in range(pipe.micro_batches)}
        pairs = {kind: [] for kind in "FBIW"}
        for action in actions:
            pairs[action.kind].append((action.stage, action.micro))
        assert set(pairs["F"]) == every
        assert {*pairs["B"], *pairs["I"]} == every
        assert len(pairs["B"]) + len(pairs["W"]) == len(every)


@each_schedule
def test_a_step_is_no_shorter_than_its_bounds(schedule: str) -> None:
    """The work of each rank, and the way of one micro-batch through all stages and back."""
    for pipe in pipes(schedule):
        found = pipe.run()
        assert found.step_s >= max(found.busy_s) - ROUNDING
        way = sum(stage.forward_s + min(stage.backward_s, stage.input_s) for stage in pipe.stages)
        assert found.step_s >= way - ROUNDING


@each_schedule
def test_ranks_are_busy_for_the_work_of_their_stages(schedule: str) -> None:
    """Busy seconds are those of all actions, and of the events that the timeline shows."""
    for pipe in pipes(schedule):
        found = pipe.run()
        work = sum(stage.forward_s + stage.backward_s for stage in pipe.stages)
        assert sum(found.busy_s) == pytest.approx(pipe.micro_batches * work)
        shown = [0.0] * pipe.ranks
        for event in found.timeline:
            if event.kind == COMPUTE:
                shown[int(event.stream.split()[1])] += event.seconds
        assert shown == pytest.approx(found.busy_s)


@each_schedule
def test_a_slower_stage_or_link_is_never_quicker(schedule: str) -> None:
    """Whichever stage takes longer, and however much longer messages take."""
    draw = random.Random(0)
    for pipe in pipes(schedule):
        base, at = pipe.run().step_s, draw.randrange(len(pipe.stages))
        slow = (*pipe.stages[:at], pipe.stages[at].at_pace(1.7), *pipe.stages[at + 1 :])
        assert replace(pipe, stages=slow).run().step_s >= base - ROUNDING
        assert replace(pipe, byte_s=pipe.byte_s + 0.1).run().step_s >= base - ROUNDING


@each_schedule
def test_all_times_by_a_factor_are_a_step_by_that_factor(schedule: str) -> None:
    """A pipeline has no time of its own."""
    for pipe in pipes(schedule):
        one, three = pipe.run(), pipe.times(3.0).run()
        assert three.step_s == pytest.approx(3 * one.step_s)
        assert three.exposed_s == pytest.approx(3 * one.exposed_s)


@each_schedule
def test_messages_add_what_they_expose(schedule: str) -> None:
    """Without them the step is shorter by the exposed seconds, of which there are none then."""
    for pipe in pipes(schedule):
        found, instant = pipe.run(), replace(pipe, byte_s=0.0).run()
        assert instant.exposed_s == instant.transfer_s == 0.0
        assert found.step_s - found.exposed_s == pytest.approx(instant.step_s)
        assert found.exposed_s <= found.transfer_s + ROUNDING


@each_schedule
def test_one_more_micro_batch_takes_longer_and_leaves_a_smaller_bubble(schedule: str) -> None:
    """More work shares the ends of a pipeline of even stages."""
    for pipe in pipes(schedule):
        stage = replace(pipe.stages[0], forward_s=1.0, backward_s=2.0, input_s=1.0, weight_s=1.0)
        even = replace(pipe, stages=(stage,) * len(pipe.stages), byte_s=0.0)
        few = even.run()
        many = replace(even, micro_batches=2 * pipe.micro_batches).run()
        bubbles = [1 - sum(run.busy_s) / pipe.ranks / run.step_s for run in (few, many)]
        assert few.step_s < many.step_s
        assert bubbles[1] <= bubbles[0] + ROUNDING


@each_schedule
def test_more_micro_batches_are_never_fewer_in_flight(schedule: str) -> None:
    """GPipe holds all of them, 1F1B no more than there are stages from here on."""
    for drawn in pipes(schedule):
        # Interleaved groups of micro-batches are of one size only if ranks divide their number.
        pipe = replace(drawn, micro_batches=2 * drawn.ranks)
        more = replace(pipe, micro_batches=3 * pipe.ranks)
        for rank, (few, many) in enumerate(zip(pipe.orders, more.orders, strict=True)):
            stages = {action.stage for action in few}
            held = [in_flight(few, stage) for stage in stages]
            assert sum(held) <= sum(in_flight(many, stage) for stage in stages)
            assert max(held) <= pipe.micro_batches
            if schedule == "gpipe":
                assert held == [pipe.micro_batches]
            if schedule == "1f1b":
                assert held == [pipe.ranks - rank]


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_late_weight_gradients_never_lengthen_a_step(schedule: str) -> None:
    """1F1B with zero bubble's splits is as quick; GPipe's bubble is 1F1B's."""
    for pipe in pipes(schedule):
        stage = StageCost(1.0, 2.0, input_s=1.0, weight_s=1.0)
        even = replace(pipe, stages=(stage,) * len(pipe.stages), byte_s=0.0)
        steps = {s: replace(even, schedule=s).run().step_s for s in ("gpipe", "1f1b")}
        split = replace(even, schedule="zero_bubble").run().step_s
        assert "zero_bubble" in SPLIT_SCHEDULES
        assert split <= steps["1f1b"] + ROUNDING
        assert steps["gpipe"] == pytest.approx(steps["1f1b"])
