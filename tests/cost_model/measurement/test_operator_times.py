import json
import operator
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.core.ir.roles import Input, Output, Parameter
from autopar.core.ir.signature import moved_bytes, signature
from autopar.core.random_inputs import index_bound
from autopar.cost_model.kernels.roofline import Roofline
from autopar.cost_model.kernels.timing import Stopwatch
from autopar.cost_model.measurement.operator_times import OperatorTimes
from autopar.cost_model.measurement.timing_context import Timing
from tests.cost_model.sketch import Sketch, aten, c10d


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))
    return tmp_path


def perceptron():
    g = Sketch()
    x = g.take(Input(0), 16, 32)
    w = g.take(Parameter("w"), 64, 32)
    turned = g.call(aten.t.default, w)
    product = g.call(aten.mm.default, x, turned)
    again = g.call(aten.mm.default, x, turned)
    total = g.call(aten.add_.Tensor, product, again)
    return g.give({Output(0): g.call(aten.sum.default, total)})


def nodes(graph):
    return {node.name: node for node in graph.graph.nodes}


def test_every_distinct_operator_is_timed_inside_of_the_step_and_views_by_their_kind():
    graph = perceptron()
    times = OperatorTimes.load("cpu").measure([graph])
    assert len(times.times) == 5  # dispatch, t, mm, add_, sum
    costs = {name: times.seconds(node) for name, node in nodes(graph).items()}
    assert costs["mm"] == costs["mm_1"]
    assert costs["t"].seconds == times.times["view aten.t.default"].seconds > 0
    assert costs["sum_1"].kind == costs["t"].kind == "measured"
    assert costs["in0"].seconds == costs["output"].seconds == 0
    assert times.times["view aten.t.default"].rehearsed
    again = times.measure([perceptron()])
    assert again == times, "what is known is not rehearsed again"


def test_a_size_that_was_not_timed_is_modelled_from_the_nearest_of_its_kind():
    def summed(rows):
        g = Sketch()
        return g.give({Output(0): g.call(aten.sin.default, g.take(Input(0), rows))})

    small, large, huge = (next(summed(rows).calls()) for rows in (1000, 2000, 10**6))
    line = replace(Roofline.default("cpu", 1), launch_s=1e-6)
    table = {signature(small): Timing(5e-6, 0, moved_bytes(small), "today")}
    times = replace(OperatorTimes.load("cpu"), times=table)
    times.__dict__["roofline"] = line
    cost = times.seconds(large)
    assert cost.seconds == pytest.approx(1e-6 + 2 * 4e-6)
    assert cost.provenance == "modelled by aten.sin.default of another size, timed here"
    assert "average core" in times.seconds(huge).provenance


def test_rates_grow_with_size():
    timed = [(1e6, 1e4, 1e-4), (1e9, 1e6, 1e-2), (0, 1e6, 1e-3), (0, 1e8, 5e-2)]
    line = Roofline.default("cpu", 1).fitted(timed, 0.0)
    assert line.seconds(2.0**20, 0) == pytest.approx(1e-4 * 2**20 / 1e6)
    assert line.seconds(2.0**30, 0) == pytest.approx(1e-2 * 2**30 / 1e9)
    between = line.seconds(2.0**25, 0)
    assert 2**25 / 1e11 < between < 2**25 / 1e10
    assert line.seconds(0, 2.0**40) == pytest.approx(2**40 / 2e9)  # as the largest


def test_kept_times_serve_the_next_process(folder):
    graph = perceptron()
    times = OperatorTimes.load("cpu").measure([graph])
    times.save()
    again = OperatorTimes.load("cpu")
    assert again == times == pickle.loads(pickle.dumps(times))
    assert OperatorTimes.load("cpu", sharing=2).times == {}
    (path,) = folder.glob("operators/*.json")
    path.write_text(path.read_text()[:100])
    with pytest.warns(UserWarning, match="damaged"):
        assert OperatorTimes.load("cpu").times == {}


def test_a_save_keeps_what_others_saved(folder):
    empty = OperatorTimes.load("cpu")
    empty.measure([perceptron()]).save()
    g = Sketch()
    other = g.give({Output(0): g.call(aten.sin.default, g.take(Input(0), 8))})
    empty.measure([other]).save()
    (path,) = folder.glob("operators/*.json")
    assert len(json.loads(path.read_text())["times"]) == 6


def test_what_cannot_be_timed_is_modelled():
    graph = perceptron()
    absent = OperatorTimes.load("NVIDIA H100 80GB HBM3").measure([graph])
    cost = absent.seconds(nodes(graph)["mm"])
    assert (cost.kind, absent.times) == ("modelled", {})
    assert "H100" in cost.provenance

    g = Sketch()
    x = g.take(Input(0), 8)
    bad = g.call(aten.view.dtype, x, torch.int32)
    fine = g.call(aten.index_put.default, x, [bad], x)
    unsound = g.call(aten.mm.default, *(g.take(Input(i), 4, 4) for i in (1, 2)))
    unsound.args = (x, x)
    both = {"fine": fine, "unsound": unsound}
    assert set(Stopwatch().times(both)) == {"fine"}
    alone = OperatorTimes.load("cpu").measure_alone(both).alone
    assert alone["fine"] > 0 == alone["unsound"]


def test_the_key_follows_shapes_strides_and_arguments_when_a_pass_changes_them():
    graph = perceptron()
    product = nodes(graph)["mm"]
    before = signature(product)
    assert "float32 cpu [32, 64]/(1, 32)" in before
    x = graph.placeholders[0]
    x.meta["val"] = x.meta["val"].new_empty(8, 32)
    assert "float32 cpu [8, 32]/(32, 1)" in signature(product) != before
    total = nodes(graph)["sum_1"]
    plain = signature(total)
    total.kwargs = {"dtype": torch.float64}
    assert signature(total) == plain[:-1] + ", dtype=torch.float64)"


def test_indices_stay_inside_the_table():
    g = Sketch()
    table, rows = g.take(Parameter("w"), 7, 3), g.take(Input(0), 2)
    index = g.call(aten._to_copy.default, rows, dtype=torch.int64)
    looked_up = g.call(aten.embedding.default, table, index)
    assert index_bound(looked_up) == 7
    assert Stopwatch().times({"it": looked_up})


def test_an_operator_is_not_run_on_integers_that_may_be_anything():
    """The backward of torch's LSTM reads addresses from its workspace."""
    g = Sketch()
    x = g.take(Input(0), 5, 2, 4)
    weights = [g.take(Parameter(str(i)), *shape) for i, shape in enumerate([(24, 4), (24, 6)])]
    weights += [g.take(Parameter(str(i)), 24) for i in (2, 3)]
    h, c = (g.take(Input(i), 1, 2, 6) for i in (1, 2))
    options = False, [], 2, 6, 1, True, False, False, True
    layer = g.call(aten.mkldnn_rnn_layer.default, x, *weights, h, c, *options)
    y, hy, cy, space = (g.call(operator.getitem, layer, i) for i in range(4))
    assert space.meta["val"].dtype == torch.uint8
    given = x, *weights, h, c, y, hy, cy, y, hy, cy
    options = False, 2, 6, 1, True, True, False, [], False
    back = g.call(aten.mkldnn_rnn_layer_backward.default, *given, *options, space)
    lengths = g.call(aten._to_copy.default, g.take(Input(3), 3), dtype=torch.int64)
    packed = g.call(aten.segment_reduce.default, x, "sum", lengths=lengths, unsafe=True)
    assert set(Stopwatch().times({"back": back, "packed": packed, "layer": layer})) == {"layer"}
    times = OperatorTimes.load("cpu")
    assert times.seconds(back).kind == "modelled"


def test_an_operator_on_nothing_does_not_spoil_the_times_of_others():
    def summed(rows):
        g = Sketch()
        return g.give({Output(0): g.call(aten.sin.default, g.take(Input(0), rows))})

    times = OperatorTimes.load("cpu").measure([summed(0)])
    times.save()
    cost = OperatorTimes.load("cpu").seconds(next(summed(8).calls()))
    assert cost.seconds > 0
    assert cost.kind == "modelled"


def test_timing_leaves_the_random_state_and_collectives_alone():
    g = Sketch(dp=2)
    x = g.take(Input(0), 8)
    noise = g.call(aten.rand_like.default, x)
    sent = g.call(c10d.all_reduce.default, noise, "sum", "dp")
    graph = g.give({Output(0): g.call(c10d.wait_tensor.default, sent)})
    before = torch.get_rng_state()
    times = OperatorTimes.load("cpu").measure([graph])
    assert torch.equal(torch.get_rng_state(), before)
    assert len(times.times) == 2  # dispatch and rand_like
    assert times.seconds(sent).kind == "measured"


def test_one_rank_of_a_host_keeps_what_all_have_measured(folder, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    measured = OperatorTimes.load("cpu").measure([perceptron()])
    measured.save()
    assert not list(folder.rglob("operators/*"))
    monkeypatch.setenv("LOCAL_RANK", "0")
    measured.save()
    assert OperatorTimes.load("cpu").times == measured.times
