"""What `autopar scale` makes of plans, which are other tests' subject."""

import io
import re
from typing import cast

import pytest
from rich.console import Console

from autopar.cli.scale import points, strategy_of
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction, Work
from autopar.core.plan.strategy import Strategy
from autopar.errors import OutOfMemoryError, StrategyError
from autopar.report.html.scaling import scaling_page
from autopar.report.scaling import ScalePoint, Scaling


def plan_of(step_s: float) -> Plan:
    cost = Prediction(
        step_s, 0.0, step_s, 0.0, 0.0, 1, {}, work=Work(8, 800, 1e12, 1e13, "float32")
    )
    return cast(Plan, type("Planned", (), {"prediction": cost, "name": "zero3"})())


def planned(strategy: Strategy, gpus: int) -> Plan:
    """Twice the GPUs take six tenths of the time; one cannot hold it."""
    if gpus == 1:
        raise OutOfMemoryError("nothing fits", 2**20)
    if gpus == 3:
        raise StrategyError("3 does not divide 8 rows")
    return plan_of({2: 1.0, 4: 0.6}[gpus])


def test_what_runs_is_compared_with_the_fewest_gpus_that_do() -> None:
    found = list(points(Strategy(), [1, 2, 3, 4], planned))
    assert found[0].why == "does not fit, 1.0 MiB too much"
    assert found[2].why == "3 does not divide 8 rows"
    assert found[1] == ScalePoint(2, "zero3", 1.0, 800.0, 0.05, 1)
    scaling = Scaling("Model", "dgx-h100", {"ddp": found}, price=3.6, cap_bytes=2**30)
    console = Console(width=80, file=io.StringIO())
    console.print(scaling.table())
    rows = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    cells = [" ".join(row.split()) for row in rows]
    assert "ddp 2 800 100% 5% 1 B 2.5" in cells
    assert "4 1,333 83% 4% 1 B 3" in cells
    costs = [p["cost_per_million"] for p in scaling.to_dict()["points"] if p["rate"]]
    assert costs == [pytest.approx(2.5), pytest.approx(3.0)]


def test_the_page_draws_every_point_and_stands_alone() -> None:
    found = list(points(Strategy(), [1, 2, 3, 4], planned))
    text = scaling_page(Scaling("Model", "dgx-h100", {"ddp": found}, cap_bytes=2**20))
    assert text.count("<svg") == 4
    titles = re.findall("<title>(.*?)</title>", text)
    assert {"ddp on 2: 800", "ddp on 4: 1,333", "ddp on 4: 83%", "ddp on 2: 1 B"} <= {*titles}
    assert "ddp on 1: does not fit, 1.0 MiB too much" in text
    assert "http" not in text
    nothing = Scaling("Model", "dgx-h100", {"ddp": found[:1]})
    assert "nothing runs" in scaling_page(nothing)


def test_strategies_by_name() -> None:
    assert strategy_of("pp4+tp8+m16+zero1") == Strategy(pp=4, tp=8, micro_batches=16, zero=1)
    assert strategy_of("fastest") == Strategy.of("fastest")
    with pytest.raises(StrategyError, match="'tpx' of 'tpx\\+zero1'"):
        strategy_of("tpx+zero1")
