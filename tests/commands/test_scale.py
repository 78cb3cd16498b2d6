"""What `autopar scale` makes of plans, which are other tests' subject."""

import io
from typing import cast

import pytest
from rich.console import Console

from autopar.commands.scale import Cell, cells, strategy_of, table
from autopar.errors import OutOfMemoryError, StrategyError
from autopar.plan.prediction import Prediction, Work
from autopar.plan.strategy import Strategy
from autopar.report.plan import Plan


def plan_of(step_s: float) -> Plan:
    cost = Prediction(
        step_s, 0.0, step_s, 0.0, 0.0, 1, {}, work=Work(8, 800, 1e12, 1e13, "float32")
    )
    return cast(Plan, type("Planned", (), {"prediction": cost})())


def planned(strategy: Strategy, gpus: int) -> Plan:
    """Twice the GPUs take six tenths of the time; one cannot hold it."""
    if gpus == 1:
        raise OutOfMemoryError("nothing fits", 2**20)
    if gpus == 3:
        raise StrategyError("3 does not divide 8 rows")
    return plan_of({2: 1.0, 4: 0.6}[gpus])


def test_what_runs_is_compared_with_the_fewest_gpus_that_do() -> None:
    found = list(cells(Strategy(), [1, 2, 3, 4], planned))
    assert found[0].why == "does not fit, 1.0 MiB too much"
    assert found[2].why == "3 does not divide 8 rows"
    assert found[1] == Cell(2, 800.0, 0.05)
    console = Console(width=120, file=io.StringIO())
    console.print(table("title", [1, 2, 3, 4], {"ddp": found}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "800 100% 5%" in text
    assert "1,333 83% 4%" in text


def test_strategies_by_name() -> None:
    assert strategy_of("pp4+tp8+m16+zero1") == Strategy(pp=4, tp=8, micro_batches=16, zero=1)
    assert strategy_of("fastest") == Strategy.of("fastest")
    with pytest.raises(StrategyError, match="'tpx' of 'tpx\\+zero1'"):
        strategy_of("tpx+zero1")
