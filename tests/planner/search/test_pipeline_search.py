"""Pipelines chosen for a cluster that is not here: all figures are modelled, so plans repeat."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar.core.common import notices
from autopar.cost_model.cluster.cluster import Cluster
from autopar.cost_model.kernels.roofline import STREAMED
from autopar.errors import BatchError, OutOfMemoryError, StrategyError
from autopar.planner.search.pipeline_search import capture_micro_batches
from tests.harness.models import MODELS
from tests.passes.golden import two_layers

WIDTH, ROWS = 4096, 65536


class Tower(nn.Module):
    """Equal layers, and a head that is as heavy as several."""

    def __init__(self, layers: int = 8, head: int = 4) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, WIDTH, bias=False, device="meta") for _ in range(layers)]
        self.layers = nn.ModuleList(made)
        self.head = nn.Linear(WIDTH, WIDTH * head, bias=False, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x).square().mean()


def planned(model, inputs=None, world_size=2, memory=None, time_limit_s=None, **fixed):
    if inputs is None:
        inputs = (torch.empty(ROWS, WIDTH, device="meta"),)
    return autopar.plan(
        model,
        world_size,
        example_inputs=inputs,
        strategy=autopar.Strategy(**fixed),
        cluster=Cluster.default(world_size, "cuda"),
        memory=memory,
        time_limit_s=time_limit_s,
    )


def layers_of(plan):
    """How many parameters each stage holds."""
    return Counter(plan.pipeline.owners.values())


def test_a_heavy_head_stands_for_several_layers():
    """8 layers and a head like 4: 6 and the rest; on 3 ranks the head alone, and 4 for each."""
    plan = planned(Tower(), pp=2, micro_batches=4, schedule="1f1b")
    assert layers_of(plan) == {0: 6, 1: 3}
    plan = planned(Tower(), world_size=3, pp=3, micro_batches=4, schedule="1f1b")
    assert layers_of(plan) == {0: 4, 1: 4, 2: 1}


def test_micro_batches_pay_for_adding_their_gradients():
    """Of four, three read their gradients and the sums of those before, and write the sums."""
    fixed = {"pp": 2, "schedule": "1f1b", "split_points": ("layers.6",)}
    stages = []
    for micro in (1, 4):
        inputs = (torch.empty(micro * ROWS, WIDTH, device="meta"),)
        plan = planned(Tower(), inputs, micro_batches=micro, **fixed)
        stages.append(plan.prediction.stages[0])
    moved = 3 * stages[0].parameter_bytes
    more_s = stages[1].backward_s - stages[0].backward_s
    assert more_s == pytest.approx(0.75 * moved / (STREAMED[""] * 1e12), rel=0.05)
    assert stages[1].forward_s == pytest.approx(stages[0].forward_s)


def test_what_is_open_is_chosen_and_shown():
    plan = planned(Tower(), pp=2)
    pipeline, cost = plan.pipeline, plan.prediction
    assert pipeline.micro_batches == 8
    assert pipeline.schedule == "zbv"
    assert len(cost.stages) == 4
    assert 0.0 < cost.bubble < 0.1
    assert {stream for _, stream, *_ in cost.events} == {
        "rank 0", "rank 1", "rank 0 to 1", "rank 1 to 0",
    }  # fmt: skip
    assert autopar.Plan.from_dict(plan.to_dict()) == plan
    assert "zbv x2, 8 micro-batches" in str(plan)
    assert "Ranks of the pipeline wait for others" in plan.explain()
    for schedule in ("dualpipe_v x2", "zero_bubble"):
        assert any(f"{schedule}, 8 micro-batches" in other.name for other in plan.runners_up)


def test_a_v_needs_two_places_to_cut_for_each_rank():
    plan = planned(Tower(layers=2), pp=2, micro_batches=8)
    assert plan.pipeline.stages_per_rank == 1
    assert not any("zbv" in other.name for other in plan.runners_up)


def test_the_two_stages_at_the_tip_of_a_v_send_each_other_nothing():
    """Of three borders between stages, the messages of two travel."""
    plan = planned(Tower(), pp=2, micro_batches=4, schedule="zbv")
    assert [plan.pipeline.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    streams = Counter(stream for name, stream, *_ in plan.prediction.events if " to " in stream)
    assert streams == {"rank 0 to 1": 8, "rank 1 to 0": 8}


def test_without_time_one_schedule_and_one_zero_stage_are_looked_at():
    plan = planned(Tower(), pp=2, world_size=4, micro_batches=8, time_limit_s=0.0)
    assert (plan.pipeline.schedule, {stage for _, stage in plan.zero_stages}) == ("1f1b", {0})
    assert not plan.runners_up


def test_what_is_fixed_is_followed():
    plan = planned(
        Tower(), pp=2, micro_batches=2, schedule="gpipe", split_points=("layers.2",), zero=0
    )
    assert (plan.pipeline.schedule, plan.pipeline.micro_batches) == ("gpipe", 2)
    assert layers_of(plan) == {0: 2, 1: 7}


@pytest.mark.slow
def test_under_a_cap_less_is_held():
    gpipe = planned(Tower(), pp=2, micro_batches=8, schedule="gpipe", recompute="none")
    free = planned(Tower(), pp=2, micro_batches=8)
    assert free.prediction.memory["saved"] < gpipe.prediction.memory["saved"] / 2
    cap = int(0.9 * free.prediction.needed_bytes)
    tight = planned(Tower(), pp=2, micro_batches=8, memory=cap)
    assert tight.prediction.needed_bytes <= cap
    assert tight.prediction.step_s > free.prediction.step_s
    with pytest.raises(OutOfMemoryError, match="nothing fits under"):
        planned(Tower(), pp=2, micro_batches=8, memory=2**30)


@pytest.mark.slow
def test_zero_stages_and_recomputation_are_chosen_with_stages():
    plan = planned(Tower(), world_size=4, pp=2, micro_batches=4)
    assert dict(plan.mesh)["pp"] == 2
    assert plan.dp_size == 2
    cap = int(0.8 * plan.prediction.needed_bytes)
    tight = planned(Tower(), world_size=4, pp=2, micro_batches=4, memory=cap)
    assert tight.prediction.needed_bytes <= cap
    assert any(stage for _, stage in tight.zero_stages) or any(
        v != "none" for _, v in tight.recompute
    )


def test_micro_batches_without_stages_save_memory():
    one, four = (planned(Tower(), world_size=1, micro_batches=m) for m in (1, 4))
    assert four.pipeline.ranks == 1
    assert four.prediction.memory["saved"] < one.prediction.memory["saved"]


def test_batch_norm_is_not_cut_into_micro_batches(monkeypatch):
    monkeypatch.setattr(notices, "ISSUED", set())
    case = MODELS["conv"]
    plan = planned(case.make(), case.batch(8, 0)[0], pp=2)
    assert plan.pipeline.micro_batches == 1
    with pytest.warns(autopar.AutoparWarning, match="one micro-batch instead of 2"):
        plan = planned(case.make(), case.batch(8, 0)[0], pp=2, micro_batches=2)
    assert plan.pipeline.micro_batches == 1
    assert any("one micro-batch instead of 2" in note for note in plan.notes)


def test_what_cannot_be_cut_is_said():
    with pytest.raises(StrategyError, match=r"Tower uses parameters in 3 places.* 4 stages"):
        planned(Tower(layers=2), world_size=4, pp=4)
    with pytest.raises(BatchError, match=r"2 rows.* cannot be cut into 3 micro-batches"):
        planned(Tower(), (torch.empty(2, WIDTH, device="meta"),), pp=2, micro_batches=3)
    with pytest.raises(StrategyError, match=r"'layers.9' is no module or parameter"):
        planned(Tower(), pp=2, split_points=("layers.9",))
    with pytest.raises(StrategyError, match="in the order of the forward"):
        planned(Tower(), world_size=3, pp=3, split_points=("layers.5", "layers.2"))


class Sorted(nn.Module):
    """Couples rows between the layers, so that the second reads gathered rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).sort(0)[0]).square().mean()


@pytest.mark.slow
def test_gathered_rows_leave_gradients_on_the_stage_of_their_parameters() -> None:
    strategy = autopar.Strategy(pp=2, micro_batches=2, zero=0, recompute="none")
    plan = autopar.plan(Sorted(), 4, example_inputs=(torch.zeros(8, 8),), strategy=strategy)
    assert dict(plan.mesh) == {"pp": 2, "dp": 2}


def test_numbers_of_micro_batches():
    """Divisors of the rows, and doubles of one where the next lies far off."""

    def numbers(rows, pp):
        graph = two_layers(ranks=2, rows=4).graph(0)

        def capture(count, even):
            if count > rows or (even and rows % count):
                raise BatchError(f"{rows} rows")
            return graph

        return list(capture_micro_batches(autopar.Strategy(pp=pp), capture))

    assert numbers(30, 2) == [1, 2, 3, 5]
    assert numbers(30, 8) == [1, 2, 3, 5, 10, 15, 30]
    assert [numbers(rows, 2) for rows in (5, 7, 9, 11)] == [
        [1, 2, 5],
        [1, 2, 4, 7],
        [1, 2, 3, 6],
        [1, 2, 4, 8],
    ]


def test_micro_batches_that_do_not_divide_the_rows_are_priced_as_the_largest():
    even, uneven, more = (
        planned(Tower(), (torch.empty(rows, WIDTH, device="meta"),), pp=2, micro_batches=4)
        for rows in (ROWS, ROWS + 1, ROWS + 4)
    )
    assert uneven.prediction.step_s == more.prediction.step_s > even.prediction.step_s
    assert any("differ by a row" in note for note in uneven.notes)
    assert not any("differ by a row" in note for plan in (even, more) for note in plan.notes)
