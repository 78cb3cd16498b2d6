"""Plan documents of schema 6, written by the code at 487a563: they load, or say why not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.core.ir.placement import OpStrategy
from autopar.core.plan.layout import Layout
from autopar.errors import PlanError

FOLDER = Path(__file__).parent / "schema_6"


@pytest.mark.parametrize("name", ["hybrid", "pipeline"])
def test_schema_6_loads(name: str) -> None:
    plan = autopar.Plan.load(FOLDER / f"{name}.json")
    assert plan.schema_version == 7
    document = json.loads((FOLDER / f"{name}.json").read_text())
    assert plan.to_dict()["placements"] == document["placements"]
    pairs = zip(plan.partitions, document["partitions"], strict=True)
    for partition, own in pairs:
        texts = [[str(op_strategy), [*names]] for op_strategy, names in partition.strategies]
        assert texts == own["ways"]
        assert all(isinstance(read, OpStrategy) for read, _ in partition.strategies)
    assert autopar.Plan.from_dict(plan.to_dict()) == plan


def test_axes_and_fields_are_renamed() -> None:
    hybrid, pipeline = (autopar.Plan.load(FOLDER / f"{n}.json") for n in ("hybrid", "pipeline"))
    assert dict(hybrid.mesh) == {"dp": 8, "tp": 2}
    assert dict(Layout(hybrid).storage) == {"dp_replicate": 4, "dp_shard": 2, "tp": 2}
    assert Layout(hybrid).axes == {"dp": 8, "tp": 2, "dp.inter_node": 4, "dp.intra_node": 2}
    assert set(dict(hybrid.sent_bytes)) <= set(Layout(hybrid).axes)
    assert dict(hybrid.zero_stages)[""] == 3
    assert hybrid.partitions[0].strategies
    assert dict(pipeline.mesh) == dict(Layout(pipeline).storage) == {"pp": 2, "dp": 2}
    assert hybrid.prediction is not None
    assert {each.axis for each in hybrid.prediction.report_data.traffic} <= set(Layout(hybrid).axes)
    assert {each.axis for each in hybrid.prediction.exposures} <= set(Layout(hybrid).axes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan | {"schema_version": 5}, "has plan schema 5 .* reads 6 and 7"),
        (lambda plan: plan | {"levels": 1}, "no plan of schema 6: TypeError"),
        (lambda plan: plan | {"mesh": [["x", 8], ["tp", 2]]}, r"\$\.mesh\[0\]\[0\] is 'x'"),
        (lambda plan: {k: v for k, v in plan.items() if k != "stages"}, "lacks .* 'zero_stages'"),
    ],
)
def test_what_cannot_be_upgraded_is_refused(
    change: Callable[[dict[str, Any]], dict[str, Any]], message: str
) -> None:
    document = json.loads((FOLDER / "hybrid.json").read_text())
    with pytest.raises(PlanError, match=f"(?s){message}.*Make the plan again"):
        autopar.Plan.from_dict(change(document))


def test_digest_covers_what_runs_only() -> None:
    plan = autopar.Plan.load(FOLDER / "pipeline.json")
    document = plan.to_dict() | {"prediction": None, "notes": [], "name": "", "runners_up": []}
    assert autopar.Plan.from_dict(document).digest() == plan.digest()
    assert autopar.Plan.from_dict(document | {"prefetch": 7}).digest() != plan.digest()
