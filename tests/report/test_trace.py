"""Traces of predicted steps: the trace event format, flows, and rows for what runs at once."""

import json
import re
from collections import Counter
from itertools import groupby, pairwise

import pytest

import autopar
from autopar.cost_model.simulator.streams import COMPUTE
from tests.report.plans import planned

FIELDS = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float, "args": dict},
    "C": {"name": str, "pid": int, "ts": float, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float},
    "f": {"name": str, "cat": str, "id": int, "bp": str, "pid": int, "tid": int, "ts": float},
}
"""Fields of each phase in the trace event format."""


def rows_of(name, folder):
    planned(name).timeline(folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def thread(row):
    return row["pid"], row["tid"]


def named(rows, kind):
    found = (row for row in rows if row["name"] == f"{kind}_name")
    return {thread(row): row["args"]["name"] for row in found}


@pytest.mark.parametrize("name", ["sharded", "stages"])
def test_a_trace_keeps_to_the_format(name, tmp_path):
    """Slices of one thread follow each other: Perfetto drops those that overlap."""
    rows, p = rows_of(name, tmp_path), planned(name).prediction
    for row in rows:
        assert {key: type(row[key]) for key in row if key != "ph"} == FIELDS[row["ph"]]
    slices = [row for row in rows if row["ph"] == "X"]
    end = max(row["ts"] + row["dur"] for row in slices)
    assert end == pytest.approx(p.step_s * 1e6, rel=1e-4)
    for _, own in groupby(sorted(slices, key=lambda r: (*thread(r), r["ts"])), key=thread):
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(own))
    assert {thread(row) for row in slices} == set(named(rows, "thread"))
    held = [sum(row["args"].values()) for row in rows if row["ph"] == "C"]
    assert max(held) == p.peak_bytes


def test_a_flow_leads_from_every_collective_to_its_wait(tmp_path):
    rows, p = rows_of("sharded", tmp_path), planned("sharded").prediction
    slices = [row for row in rows if row["ph"] == "X"]
    assert len(slices) == len(p.events) + len(p.report_data.spans)
    waits = [event for event in p.events if event[4] == "wait"]
    pairs = pairs_of(rows)
    assert len(pairs) == len(waits) > 0
    for source, wait in pairs:
        assert wait["name"] == f"wait for {source['name']}"
        assert source["args"]["bytes"] == wait["args"]["bytes"] > 0
        assert re.match(r"b?float\d+\[", source["args"]["shapes"])
    groups, threads = named(rows, "process"), named(rows, "thread")
    where = {(groups[source["pid"], 0], threads[thread(source)]) for source, _ in pairs}
    assert {group for group, _ in where} == {"dp, 4 ranks", "tp, 2 ranks"}
    assert {row for _, row in where} <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}


def test_a_pipeline_shows_operators_in_actions_and_flows_to_receivers(tmp_path):
    rows, p = rows_of("stages", tmp_path), planned("stages").prediction
    groups, threads = named(rows, "process"), named(rows, "thread")
    assert list(groups.values())[:4] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    slices = [row for row in rows if row["ph"] == "X"]
    by_row = {key: [r for r in slices if thread(r) == key] for key in threads}
    for key, name in threads.items():
        if name == "operators":
            (actions,) = (k for k, n in threads.items() if k[0] == key[0] and n == "actions")
            assert all(any(inside(row, a) for a in by_row[actions]) for row in by_row[key])
    trained = [event for event in p.events if event[4] == COMPUTE and event[0] != "optimizer"]
    operators = Counter(r["name"] for r in slices if threads[thread(r)] == "operators")
    assert operators["mm"] + operators["addmm"] >= len(trained)
    sent = [event for event in p.events if event[4] == "send"]
    pairs = [(a, b) for a, b in pairs_of(rows) if a["cat"] == "send"]
    assert len(pairs) == len(sent) == 2 * 3 * 4  # both ways, over 3 boundaries, 4 micro-batches
    for message, action in pairs:
        assert message["ts"] + message["dur"] <= action["ts"] + 1e-3
        assert message["name"].endswith(f"to stage {action['args']['stage']}")
        assert message["args"]["bytes"] > 0
        assert re.match(r"b?float\d+\[", message["args"]["shapes"])


def pairs_of(rows):
    """Slices at both ends of each flow: those that enclose its times, as Perfetto binds them."""
    ends = {"s": {}, "f": {}}
    for row in rows:
        if row["ph"] in ends:
            own = (r for r in rows if r["ph"] == "X" and thread(r) == thread(row))
            at = nanoseconds(row["ts"])
            (ends[row["ph"]][row["id"]],) = (
                r
                for r in own
                if nanoseconds(r["ts"]) <= at < nanoseconds(r["ts"]) + nanoseconds(r["dur"])
            )
    assert ends["s"].keys() == ends["f"].keys()
    return [(ends["s"][number], ends["f"][number]) for number in ends["s"]]


def nanoseconds(microseconds):
    return round(microseconds * 1e3)


def inside(row, other):
    ends = row["ts"] + row["dur"], other["ts"] + other["dur"]
    return other["ts"] - 2e-3 <= row["ts"] and ends[0] <= ends[1] + 2e-3


def test_what_was_not_predicted_has_no_timeline(tmp_path):
    with pytest.raises(autopar.PlanError, match="no prediction"):
        planned("fixed").timeline(tmp_path / "trace.json")
