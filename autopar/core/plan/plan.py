"""`Plan`: decisions, their prediction, and where both come from; stored as a JSON document."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopar.core.common.checks import demand
from autopar.core.common.documents import Amount, Count, Positive, as_text, load, write_text
from autopar.core.plan.decisions import Decisions
from autopar.core.plan.prediction import Prediction, RunnerUp
from autopar.core.plan.reader import read_plan
from autopar.core.plan.search_outcome import SearchOutcome
from autopar.core.plan.upgrade import SCHEMA_VERSION
from autopar.errors import PlanError
from autopar.formatting import printable


@dataclass(frozen=True, kw_only=True)
class Plan(Decisions):
    """A plan for distributed training of a model.

    Attributes:
        name: short description.
        model: class name of the model.
        optimizer: name of the assumed optimizer.
        optimizer_state_ratio: bytes of optimizer state per byte of parameter.
        memory_cap: memory limit of a rank, in bytes; None for no limit.
        parameter_dtypes: bytes of unsharded parameters of each dtype, the largest first; () if
            unknown.
        prediction: predicted cost; None if the plan was not simulated.
        sent_bytes: bytes that a rank sends over each axis in a step.
        runners_up: other plans and their predicted cost.
        search: extent of the search, its bound and torch's best; None without a prediction.
        cluster: name of the cluster, and the source of its figures.
        comm_backend: backend of torch.distributed that the plan is priced on.
        notes: limitations to show to the user.
        torch: version of torch that made the plan.
        schema_version: version of the document.
    """

    name: str
    model: str
    optimizer: str = "AdamW"
    optimizer_state_ratio: Amount = 2.0
    memory_cap: Positive | None = None
    parameter_dtypes: tuple[tuple[str, Count], ...] = ()
    prediction: Prediction | None = None
    sent_bytes: tuple[tuple[str, Count], ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()
    search: SearchOutcome | None = None
    cluster: str = ""
    comm_backend: str = "gloo"
    notes: tuple[str, ...] = ()
    torch: str = field(default_factory=lambda: str(torch.__version__))
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can store."""
        return json.loads(as_text(self))

    def to_json(self) -> str:
        """JSON text; equal plans give equal bytes."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON.

        Raises:
            PlanError: the file cannot be written.
        """
        write_text(path, self.to_json(), PlanError)

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
        # Reports are imported on demand: the runtime loads plans, but never the HTML page.
        from autopar.report.diff import diff_lines

        demand(isinstance(other, Plan), "other", other, "give a Plan")
        return printable("\n".join(diff_lines(self, other)))

    def explain(self) -> str:
        """Explains the choice: bottleneck, sensitivity, and why runners-up lost."""
        from autopar.report.explain import explain

        return explain(self)

    def timeline(self, path: str | Path) -> None:
        """Writes the predicted step as a Chrome trace for ui.perfetto.dev.

        Raises:
            PlanError: The plan has no prediction, because the strategy left nothing to choose.
            StrategyError: the file cannot be written.
        """
        from autopar.report.trace import write_timeline

        write_timeline(path, self)

    def report(self, path: str | Path) -> None:
        """Writes the plan as one self-contained HTML page.

        Raises:
            PlanError: the file cannot be written.
        """
        from autopar.report.html.page import page

        write_text(path, page(self), PlanError)

    def __str__(self) -> str:
        from autopar.report.table import table

        return table(self)
