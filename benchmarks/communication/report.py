"""Rows and tables of races over a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.cluster.network import bits_per_second
from benchmarks.communication.contenders import ALONE
from benchmarks.contenders import PLAIN, Contender
from benchmarks.report import TOLERANCE, empty_table, loss_difference, number, quartiles, ratios


@dataclass(frozen=True)
class Setting:
    """Model and network of a race.

    Attributes:
        model: name of the case.
        nodes: number of emulated nodes.
        ranks_per_node: processes on each node.
        rate: rate of each link, such as "1gbit".
    """

    model: str
    nodes: int
    ranks_per_node: int
    rate: str

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        return f"{self.model}, {self.nodes}x{self.ranks_per_node} at {self.rate}"


@dataclass(frozen=True)
class Row:
    """One contender's result in one setting; times are those of the slowest rank.

    Attributes:
        step_s: median of the steps, in seconds.
        quartiles_s: first and third quartile of the same.
        exposed_s: median over the rounds of the step minus the step of the model alone, which runs
            on the same rows on all processes at once. It includes compressing.
        sent_bytes: bytes sent in a step by the busiest node, counted at its interface.
        planned_bytes: the same by the plan, for contenders of autopar.
        bound_ratio: step over its lower bound, the longer of the model alone and of `sent_bytes`
            over the link.
        peer: contender of the ratio.
        ratio: median over the rounds of this step over the peer's.
        loss_difference: worst relative difference from the plain model's losses.
        error: reason why there are no valid figures.
    """

    model: str
    nodes: int
    ranks_per_node: int
    rate: str
    contender: str
    step_s: float | None = None
    quartiles_s: tuple[float, float] | None = None
    exposed_s: float | None = None
    sent_bytes: float | None = None
    planned_bytes: int | None = None
    bound_ratio: float | None = None
    peer: str | None = None
    ratio: float | None = None
    loss_difference: float | None = None
    error: str | None = None


def rows(setting: Setting, field: Sequence[Contender], outcome: Mapping[str, Any]) -> list[Row]:
    """Return a row for each contender, in the order of the field."""
    results = {result["contender"]: result for result in outcome["contenders"]}
    ran = {name: result for name, result in results.items() if result["error"] is None}
    made = []
    for contender in field:
        figures: dict[str, Any] = {"error": results[contender.name]["error"]}
        if contender.name in ran:
            figures = _speed(setting, contender, ran)
            if contender.reference == PLAIN:
                figures |= _exactness(ran[contender.name]["losses"], outcome["reference"])
            figures["planned_bytes"] = ran[contender.name].get("planned_bytes")
        made.append(Row(**vars(setting), contender=contender.name, **figures))
    return made


def _speed(setting: Setting, contender: Contender, ran: Mapping[str, Any]) -> dict[str, Any]:
    seconds = ran[contender.name]["seconds"]
    figures: dict[str, Any] = {"step_s": median(seconds), "quartiles_s": quartiles(seconds)}
    if ALONE in ran and contender.name != ALONE:
        alone = ran[ALONE]
        sent = max(0.0, median(ran[contender.name]["sent"]) - median(alone["sent"]))
        bound_s = max(median(alone["seconds"]), 8 * sent / bits_per_second(setting.rate))
        figures |= {
            "exposed_s": median(a - b for a, b in zip(seconds, alone["seconds"], strict=True)),
            "sent_bytes": sent,
            "bound_ratio": median(seconds) / bound_s,
        }
    if peer := next((name for name in contender.peers if name in ran), None):
        figures |= {"peer": peer, "ratio": median(ratios(seconds, ran[peer]["seconds"]))}
    return figures


def _exactness(losses: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    worst = loss_difference(losses, reference)
    error = None if worst <= TOLERANCE else f"losses differ by {worst:.1e} from the plain model's"
    return {"loss_difference": worst, "error": error}


def table(setting: Setting, made: Sequence[Row]) -> Table:
    """Return the rows of one setting as a table; quartiles in brackets."""
    headings = ("step, ms", "exposed, ms", "sent, MB", "as planned", "/ bound", "/ peer's", "peer")
    drawn = empty_table(str(setting), "contender", headings)
    for row in made:
        if row.step_s is None or row.quartiles_s is None:
            drawn.add_row(row.contender, "no figures, see below", style="red")
            continue
        low, high = (f"{1e3 * seconds:.0f}" for seconds in row.quartiles_s)
        excess = (row.sent_bytes or 0.0) / row.planned_bytes - 1 if row.planned_bytes else None
        drawn.add_row(
            row.contender,
            f"{1e3 * row.step_s:.0f} ({low} to {high})",
            number(row.exposed_s, 1e3, ".0f"),
            number(row.sent_bytes, 1e-6, ".2f"),
            number(excess, 1, "+.1%"),
            number(row.bound_ratio, 1, ".2f"),
            number(row.ratio, 1, ".2f"),
            row.peer or "",
            style="red" if row.error else "",
        )
    return drawn
