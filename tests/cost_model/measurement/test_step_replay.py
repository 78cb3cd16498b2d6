import gc
import statistics

import pytest
import torch

from autopar.core.ir.roles import Gradient, Input, Output, Parameter, Tangent
from autopar.core.ir.signature import time_key
from autopar.cost_model.measurement.step_replay import (
    SINGLE_RANK,
    ReplayGroup,
    TimedProgram,
    arguments_of,
    replay_step,
)
from tests.cost_model.sketch import Sketch, aten, c10d
from tests.harness.worlds import run


def classifier():
    """Looks rows up, multiplies, reduces over the ranks and goes back: (graph, its nodes)."""
    g = Sketch(dp=2)
    table, weight = g.take(Parameter("table"), 7, 16), g.take(Parameter("w"), 16, 16)
    rows = g.call(aten._to_copy.default, g.take(Input(0), 5), dtype=torch.int64)
    looked_up = g.call(aten.embedding.default, table, rows)
    hidden = g.call(aten.mm.default, looked_up, weight)
    sent = g.call(c10d.all_reduce.default, hidden, "sum", "dp")
    done = g.call(c10d.wait_tensor.default, sent)
    g.phase = "backward"
    back = g.call(aten.mul.Tensor, done, g.take(Tangent(0), 5, 16))
    return g.give({Output(0): done, Gradient(Parameter("w")): back})


def test_the_whole_step_runs_and_every_operator_has_a_time():
    graph = classifier()
    found = replay_step([graph], budget_s=0.01)
    timed = {time_key(node) for node in graph.calls()}
    assert any(key.startswith("wait for _c10d_functional.all_reduce") for key in timed)
    assert timed == set(found)
    assert all(seconds > 0 for seconds in found.values())


def test_times_add_up_to_the_mean_rank_of_a_middling_round():
    graph = classifier()
    totals = []

    def gather(value):
        """Beside a rank that takes twice as long."""
        if not isinstance(value, tuple):
            return [value, value]
        mine, table = value
        totals.extend(mine)
        slow = {key: [2 * t for t in times] for key, times in table.items()}
        return [value, ([2 * t for t in mine], slow)]

    found = replay_step([graph], ReplayGroup(lambda: None, gather), budget_s=0.01)
    total = sum(found[key] for key in TimedProgram(graph).keys if key is not None)
    assert total == pytest.approx(1.5 * statistics.median(totals))


def test_ranks_that_share_cores_are_timed_by_cpu_time(monkeypatch):
    """Operators take 2 ms of CPU time each, and waits the rest of a run's wall time."""
    clock = [0.0, 0.0]

    def tick(program):
        clock[0] += 5e-3
        clock[1] += 2e-3
        program._ticks.append(tuple(clock))

    monkeypatch.setattr(TimedProgram, "_tick", tick)
    program = TimedProgram(classifier(), ranks_per_core=2.0)
    spans = program.run(SINGLE_RANK)
    waits = [key is not None and key.startswith("wait for") for key in program.keys]
    assert sum(spans) == pytest.approx(5e-3 * len(spans))
    assert [s for s, waited in zip(spans, waits, strict=True) if not waited] == pytest.approx(
        [2 * 2e-3] * (len(spans) - 1)
    )
    alone = TimedProgram(classifier()).run(SINGLE_RANK)
    assert alone == pytest.approx([5e-3] * len(spans))


def test_integers_stay_inside_of_the_tables_they_index():
    g = Sketch()
    table = g.take(Parameter("table"), 7, 3)
    rows = g.take(Input(0), 100)
    rows.meta["val"] = rows.meta["val"].long()
    turned = g.call(aten.view.default, rows, [10, 10])
    graph = g.give({Output(0): g.call(aten.embedding.default, table, turned)})
    values = arguments_of(graph)
    assert values[1].dtype == torch.int64
    assert 0 <= int(values[1].min()) < int(values[1].max()) < 7
    assert values[0].abs().max() <= 0.05


def test_what_cannot_be_rehearsed_is_left_alone():
    g = Sketch()
    x = g.take(Input(0), 8)
    bad = g.call(aten.mm.default, *(g.take(Input(i), 4, 4) for i in (1, 2)))
    bad.args = (x, x)
    assert replay_step([g.give({Output(0): bad})]) == {}
    assert replay_step([]) == {}


def test_a_program_that_cannot_run_keeps_no_tensors_and_hinders_no_other():
    g = Sketch()
    x = g.take(Input(0), 1237)
    bad = g.call(aten.mm.default, *(g.take(Input(i), 4, 4) for i in (1, 2)))
    bad.args = (x, x)
    graph = g.give({Output(0): bad})
    gc.collect()
    gc.disable()
    try:
        found = replay_step([classifier(), graph], budget_s=0.01)
        kept = [o for o in gc.get_objects() if type(o) is torch.Tensor]
    finally:
        gc.enable()
    assert found.keys() == replay_step([classifier()], budget_s=0.01).keys()
    assert not [tensor for tensor in kept if tensor.shape in {(1237,), (7, 16)}]


def _rehearse_live(rank: int, world_size: int) -> tuple:
    ranks = ReplayGroup.live()
    return ranks.sharing, replay_step([classifier()], ranks, budget_s=0.01)


def test_ranks_rehearse_at_once_and_agree():
    answers = run(_rehearse_live, 2)
    assert answers[0] == answers[1]
    assert answers[0][0] == 2
