"""Traces of predicted steps: rows of their own for what runs at once."""

import json
from itertools import groupby, pairwise

import pytest

import autopar
from tests.report.plans import planned


@pytest.mark.parametrize("name", ["sharded", "stages"])
def test_a_trace_keeps_to_the_format(name, tmp_path):
    """Slices of one thread follow each other: Perfetto drops those that overlap."""
    plan = planned(name)
    plan.timeline(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [row for row in rows if row["ph"] == "X"]
    blocks = len(plan.prediction.report_data.spans)
    assert len(slices) == len(plan.prediction.events) + blocks
    end = max(row["ts"] + row["dur"] for row in slices)
    assert end == pytest.approx(plan.prediction.step_s * 1e6, rel=1e-4)

    def thread(row):
        return row["pid"], row["tid"]

    for _, own in groupby(sorted(slices, key=lambda r: (*thread(r), r["ts"])), key=thread):
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(own))
    named = {thread(row) for row in rows if row["name"] == "thread_name"}
    assert {thread(row) for row in slices} == named
    held = [sum(row["args"].values()) for row in rows if row["ph"] == "C"]
    assert max(held) == plan.prediction.peak_bytes


def test_ranks_of_a_pipeline_are_processes(tmp_path):
    planned("stages").timeline(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert names[:4] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_what_was_not_predicted_has_no_timeline(tmp_path):
    with pytest.raises(autopar.PlanError, match="no prediction"):
        planned("fixed").timeline(tmp_path / "trace.json")
