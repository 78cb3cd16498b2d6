import json

from autopar.core.ir.roles import Input, Output
from autopar.cost_model.simulator.chrome_trace import (
    CollectiveIndex,
    chrome_trace,
    slices_of,
    waited,
    write_trace,
)
from autopar.cost_model.simulator.streams import COMPUTE, Event
from tests.cost_model.sketch import Sketch, aten, c10d


def test_a_trace_has_a_row_for_each_stream_and_the_bytes_below(tmp_path):
    events = [
        Event("mm", COMPUTE, 0.0, 0.5, COMPUTE),
        Event("sum", "dp", 0.25, 1.0, "all_reduce"),
        Event("wait", COMPUTE, 0.5, 1.0, "wait"),
    ]
    slices = slices_of("predicted", events)
    flows = waited(slices, {"wait": "sum"})
    more = slices_of("measured", events[:1])
    write_trace(
        tmp_path / "trace.json",
        chrome_trace([*slices, *more], {"predicted": [(0.5, 400)]}, flows),
    )
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = [r for r in rows if r["ph"] == "M" and "name" in r["args"]]
    assert {(r["args"]["name"], r["pid"], r["tid"]) for r in named} == {
        ("predicted", 1, 0),
        (COMPUTE, 1, 1),
        ("dp", 1, 2),
        ("measured", 2, 0),
        (COMPUTE, 2, 1),
    }
    drawn = {(r["name"], r["pid"], r["tid"], r["ts"], r["dur"]) for r in rows if r["ph"] == "X"}
    assert drawn == {
        ("mm", 1, 1, 0.0, 0.5e6),
        ("sum", 1, 2, 0.25e6, 0.75e6),
        ("wait", 1, 1, 0.5e6, 0.5e6),
        ("mm", 2, 1, 0.0, 0.5e6),
    }
    arrows = [(r["ph"], r["id"], r["tid"], r["ts"]) for r in rows if r["ph"] in "sf"]
    assert arrows == [("s", 1, 2, 0.25e6), ("f", 1, 1, 0.5e6)]
    assert [(r["ts"], r["args"]) for r in rows if r["ph"] == "C"] == [(0.5e6, {"bytes": 400})]


def test_collectives_land_with_their_waits():
    g = Sketch(dp=2)
    x = g.take(Input(0), 4)
    sent = g.call(c10d.all_reduce.default, x, "sum", "dp")
    g.call(aten.sin.default, x)
    done = g.call(c10d.wait_tensor.default, sent)
    flights = CollectiveIndex(g.give({Output(0): done}))
    assert flights.kind(sent.name) == COMPUTE
    assert flights.kind(done.name) == "wait"
    assert flights.landed(sent.name, 1.0, 1.5) == []
    assert flights.landed(done.name, 3.0, 4.0) == [Event(sent.name, "dp", 1.0, 4.0, "all_reduce")]
