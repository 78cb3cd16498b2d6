"""`Plan`: a `PlanSpec` with text reports, an HTML report and a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autopar.common.checks import demand
from autopar.common.documents import load, write_text
from autopar.cost_model.simulator.chrome_trace import write_trace
from autopar.errors import PlanError
from autopar.formatting import printable
from autopar.plan.reader import read_plan
from autopar.plan.spec import PlanSpec
from autopar.report.diff import diff_lines
from autopar.report.explain import explain
from autopar.report.html.page import page
from autopar.report.table import table
from autopar.report.trace import trace


class Plan(PlanSpec):
    """A plan for distributed training of a model; `PlanSpec` lists the fields."""

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Reads a plan that `save` wrote.

        Raises:
            PlanError: The file is not a plan of a known schema; the message names the field.
        """
        return Plan.from_dict(load(path, "plan", PlanError), str(path))

    @staticmethod
    def from_dict(document: Any, source: str = "the document") -> Plan:
        """The plan in a document made by `to_dict`.

        Raises:
            PlanError: A field is unknown, missing, of another type or out of range.
        """
        return read_plan(document, Plan, source)

    def diff(self, other: Plan) -> str:
        """Differences between two plans, one line per field; "" if they are equal."""
        demand(isinstance(other, Plan), "other", other, "give a Plan")
        return printable("\n".join(diff_lines(self, other)))

    def explain(self) -> str:
        """Explains the choice: bottleneck, sensitivity, and why runners-up lost."""
        return explain(self)

    def timeline(self, path: str | Path) -> None:
        """Writes the predicted step as a Chrome trace for ui.perfetto.dev.

        Raises:
            PlanError: The plan has no prediction, because the strategy left nothing to choose.
            StrategyError: the file cannot be written.
        """
        write_trace(path, trace(self))

    def report(self, path: str | Path) -> None:
        """Writes the plan as one self-contained HTML page.

        Raises:
            PlanError: the file cannot be written.
        """
        write_text(path, page(self), PlanError)

    def __str__(self) -> str:
        return table(self)
