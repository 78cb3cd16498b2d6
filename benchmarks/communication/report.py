"""From the outcome of a race over a network to rows and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.cluster.network import bits_per_second
from benchmarks.communication.field import ALONE, UNBUCKETED
from benchmarks.contenders import PLAIN, Contender
from benchmarks.report import TOLERANCE, quartiles


@dataclass(frozen=True)
class Setting:
    """What a race is run on.

    Attributes:
        model: name of the case.
        nodes: of the emulated cluster.
        ranks_per_node: processes on each.
        rate: of each link, such as "1gbit".
        gradient_bytes: of the whole model.
    """

    model: str
    nodes: int
    ranks_per_node: int
    rate: str
    gradient_bytes: int

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.nodes * self.ranks_per_node

    @property
    def reduced_bytes(self) -> float:
        """What each rank sends of the gradients as they are, in an all-reduce that sends least."""
        return 2 * (self.ranks - 1) / self.ranks * self.gradient_bytes

    def __str__(self) -> str:
        return f"{self.model}, {self.nodes}x{self.ranks_per_node} at {self.rate}"


@dataclass(frozen=True)
class Row:
    """One contender's result in one setting; times are those of the slowest rank.

    Attributes:
        step_s: median of the steps, in seconds.
        quartiles_s: first and third quartile of the same.
        speed_up: median over the rounds of the unbucketed step by this one.
        exposed_s: median over the rounds of what a step takes more than the model alone on the
            same rows, on all processes at once. Compressing counts here.
        bits_per_s: effective bandwidth: an all-reduce of the gradients as they are would take
            `exposed_s` at this rate.
        sent_bytes: of the node that sends most, in a step, counted at its interface.
        planned_bytes: the same as the plan has it; of autopar's ways alone.
        forced_s: what data dependence forces to be exposed; of autopar's ways alone.
        bound_s: the longer of the step of the model alone and the time that the link takes for
            `sent_bytes`; and `forced_s`.
        bound_ratio: the step by this bound.
        peer: the fastest of those that it is compared with.
        ratio: median over the rounds of this step by the peer's.
        loss_difference: worst relative difference from the plain model, of those that train it.
        error: why there are no figures, or why they do not count.
    """

    model: str
    nodes: int
    ranks_per_node: int
    rate: str
    contender: str
    step_s: float | None = None
    quartiles_s: tuple[float, float] | None = None
    speed_up: float | None = None
    exposed_s: float | None = None
    bits_per_s: float | None = None
    sent_bytes: float | None = None
    planned_bytes: int | None = None
    forced_s: float | None = None
    bound_s: float | None = None
    bound_ratio: float | None = None
    peer: str | None = None
    ratio: float | None = None
    loss_difference: float | None = None
    error: str | None = None


def parts(outcome: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Return the outcome of each rate: as many of the rounds; losses are those of all."""
    made = []
    for part in range(count):
        results = [dict(result) for result in outcome["contenders"]]
        for result in results:
            for name in {"seconds", "sent"} & set(result):
                size = len(result[name]) // count
                result[name] = result[name][part * size :][:size]
        made.append({**outcome, "contenders": results})
    return made


def rows(setting: Setting, field: Sequence[Contender], outcome: Mapping[str, Any]) -> list[Row]:
    """Return a row for each contender, in the order of the field."""
    results = {result["contender"]: result for result in outcome["contenders"]}
    ran = {name: result for name, result in results.items() if result["error"] is None}
    made = []
    for contender in field:
        own: dict[str, Any] = {"error": results[contender.name]["error"]}
        if contender.name in ran:
            own = _speed(setting, contender, ran)
            if contender.reference == PLAIN:
                own |= _exactness(ran[contender.name]["losses"], outcome["reference"])
            own["planned_bytes"] = ran[contender.name].get("planned_bytes")
        made.append(
            Row(
                setting.model,
                setting.nodes,
                setting.ranks_per_node,
                setting.rate,
                contender.name,
                **own,
            )
        )
    return made


def _speed(setting: Setting, contender: Contender, ran: Mapping[str, Any]) -> dict[str, Any]:
    seconds = ran[contender.name]["seconds"]
    figures: dict[str, Any] = {"step_s": median(seconds), "quartiles_s": quartiles(seconds)}
    if ALONE in ran and contender.name != ALONE:
        alone = ran[ALONE]
        exposed = median(a - b for a, b in zip(seconds, alone["seconds"], strict=True))
        sent = max(0.0, median(ran[contender.name]["sent"]) - median(alone["sent"]))
        compute, link = median(alone["seconds"]), 8 * sent / bits_per_second(setting.rate)
        bound = max(compute, link)
        if shares := ran[contender.name].get("buckets"):
            figures["forced_s"] = least_step(compute, link, shares) - bound
            bound += figures["forced_s"]
        figures |= {"exposed_s": exposed, "sent_bytes": sent}
        figures |= {"bound_s": bound, "bound_ratio": median(seconds) / bound}
        if exposed > 0:
            figures["bits_per_s"] = 8 * setting.reduced_bytes / exposed
    if UNBUCKETED in ran:
        figures["speed_up"] = median(_ratios(ran[UNBUCKETED]["seconds"], seconds))
    peers = [name for name in contender.peers if name in ran]
    if peers:
        peer = min(peers, key=lambda name: median(ran[name]["seconds"]))
        figures |= {"peer": peer, "ratio": median(_ratios(seconds, ran[peer]["seconds"]))}
    return figures


def least_step(compute_s: float, link_s: float, shares: Sequence[float]) -> float:
    """Return the shortest step in which no bucket is sent before it has been computed.

    Backwards take two thirds of a step, gradients appear evenly in it, and the link sends bucket
    after bucket: behind the last one that it waits for, all the rest.

    Args:
        compute_s: the step of the model alone.
        link_s: for all buckets.
        shares: part of the gradients that each bucket is, in order.
    """
    ready, least = compute_s / 3, 0.0
    for index, share in enumerate(shares):
        ready += share * compute_s * 2 / 3
        least = max(least, ready + sum(shares[index:]) * link_s)
    return least


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def _exactness(losses: Sequence[float], reference: Sequence[float]) -> dict[str, Any]:
    worst = max(abs(a / b - 1) for a, b in zip(losses, reference, strict=True))
    error = None if worst <= TOLERANCE else f"losses differ by {worst:.1e} from the plain model's"
    return {"loss_difference": worst, "error": error}


HEADINGS = (
    "step, ms",
    "speed-up",
    "exposed, ms",
    "Gbit/s",
    "sent, MB",
    "as planned",
    "/ bound",
    "/ peer's",
)


def table(setting: Setting, made: Sequence[Row]) -> Table:
    """Return the rows of one setting as a table; quartiles in brackets."""
    drawn = Table(title=str(setting), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("contender", no_wrap=True)
    for heading in HEADINGS:
        drawn.add_column(heading, justify="right", no_wrap=True)
    drawn.add_column("peer", no_wrap=True)
    for row in made:
        drawn.add_row(*_cells(row), style="red" if row.error else "")
    return drawn


def _cells(row: Row) -> list[str]:
    if row.step_s is None or row.quartiles_s is None:
        return [row.contender, "no figures, see below"]
    low, high = (f"{1e3 * seconds:.0f}" for seconds in row.quartiles_s)
    return [
        row.contender,
        f"{1e3 * row.step_s:.0f} ({low} to {high})",
        _text(row.speed_up, 1, ".2f"),
        _text(row.exposed_s, 1e3, ".0f"),
        _text(row.bits_per_s, 1e-9, ".2f"),
        _text(row.sent_bytes, 1e-6, ".2f"),
        "" if not row.planned_bytes else f"{_deviation(row):+.1%}",
        _text(row.bound_ratio, 1, ".2f"),
        _text(row.ratio, 1, ".2f"),
        row.peer or "",
    ]


def _text(value: float | None, unit: float, form: str) -> str:
    return "" if value is None else format(unit * value, form)


def _deviation(row: Row) -> float:
    """By how much more was sent than planned, relative to that."""
    return (row.sent_bytes or 0.0) / (row.planned_bytes or 1) - 1
