"""`Plan`: a `PlanSpec` with text reports, an HTML report and a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autopar.common.checks import demand
from autopar.common.documents import load
from autopar.cost_model.simulator.chrome_trace import chrome_trace, write_trace
from autopar.cost_model.simulator.streams import COMPUTE, Event
from autopar.errors import PlanError
from autopar.formatting import printable
from autopar.plan.prediction import Prediction
from autopar.plan.reader import read_plan
from autopar.plan.spec import PlanSpec
from autopar.report.diff import diff_lines
from autopar.report.explain import explain
from autopar.report.html.page import page
from autopar.report.table import table


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
        """
        write_trace(path, trace(self))

    def report(self, path: str | Path) -> None:
        """Writes the plan as one self-contained HTML page."""
        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        return table(self)


def trace(plan: PlanSpec) -> dict[str, Any]:
    """Trace with one process for the predicted rank, or one per pipeline rank."""
    p = plan.prediction
    if p is None:
        raise PlanError(
            f"the plan {plan.name!r} has no prediction: give a strategy that leaves something "
            "to choose, or a memory cap, and plan again"
        )
    name = f"predicted: {plan.name}"
    if not p.stages:
        blocks = (
            Event(block or "outside of blocks", "blocks", start_s, end_s, phase)
            for block, phase, start_s, end_s in p.report_data.spans
        )
        events = [*blocks, *(Event(*row) for row in p.events)]
        return chrome_trace({name: events}, {name: _memory(p)})
    ranks = {f"rank {rank}": list(_of_rank(p, rank)) for rank in range(len(p.idle))}
    held = "memory of the rank that needs most"
    return chrome_trace({**ranks, held: []}, {held: _memory(p)})


def _of_rank(p: Prediction, rank: int) -> Iterator[Event]:
    """Actions of a pipeline rank, and the messages that it sends."""
    own = f"rank {rank}"
    for name, stream, start_s, end_s, kind in p.events:
        if stream == own:
            yield Event(name, COMPUTE, start_s, end_s, kind)
        elif stream.startswith(f"{own} to "):
            yield Event(name, f"to rank {stream.split()[-1]}", start_s, end_s, kind)


def _memory(p: Prediction) -> Iterator[tuple[float, int | Mapping[str, int]]]:
    """Bytes by category if known, otherwise of all tensors."""
    if not p.report_data.memory:
        yield from p.memory_curve
        return
    names = [name for name, _ in p.report_data.memory]
    columns = zip(*(row for _, row in p.report_data.memory), strict=True)
    for at, column in zip(p.report_data.memory_s, columns, strict=True):
        yield at, dict(zip(names, column, strict=True))
