"""Section on the alternatives: other plans of the search, and usual layouts by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import RunnerUp
from autopar.core.plan.search_outcome import DDP, FSDP
from autopar.formatting import duration, human_bytes
from autopar.report.html.figures import (
    byte_ticks,
    even_ticks,
    grid,
    seconds,
    size,
    tick_text,
)
from autopar.report.html.markup import Markup, join, section, table, tag
from autopar.report.verdict import unpriced_layouts, usual_layouts, usual_names, verdict_lines

_WIDE, _TALL, _LEFT, _LOW = 340, 250, 62, 30
_NEAR = 1.5  # maximum ratio of a drawn cap to the largest plan


def runners(plan: Plan) -> Markup:
    """Renders the section; empty without other plans."""
    others = alternatives(plan) if plan.prediction is not None else []
    unpriced = [*_unpriced(plan)]
    if len(others) + len(unpriced) < 2:
        return Markup("")
    labels = _labels(plan)
    rows = [_row(number, other, others[0], labels) for number, other in enumerate(others)]
    rows += unpriced
    caption = tag("figcaption", "Memory over the time of a step; the chosen plan is filled")
    figure = tag("figure", caption, _chart(plan, others, labels))
    headings = "", "plan", "step >", "of chosen >", "memory >", "why not"
    listed = table(headings, rows, "By the time of a step")
    extent = (tag("p", line, class_="lead") for line in list(verdict_lines(plan))[1:])
    both = tag("div", figure, listed, class_="beside")
    return section("others", "Alternatives", *extent, both)


def alternatives(plan: Plan) -> list[RunnerUp]:
    """The chosen plan, then the others by step time; usual layouts are among them if priced."""
    assert plan.prediction is not None
    chosen = RunnerUp.of(plan.name, plan.prediction, "chosen")
    found = {
        own.name: own for own in (*usual_layouts(plan), *plan.runners_up, *_torch(plan).values())
    }
    found.pop(plan.name, None)
    return [chosen, *sorted(found.values(), key=lambda other: other.step_s)]


def _torch(plan: Plan) -> dict[str, RunnerUp]:
    """Plans of torch's data parallelism, by name."""
    known = plan.search
    pairs = ((DDP, known.ddp), (FSDP, known.fsdp)) if known is not None else ()
    return {label: other for label, other in pairs if other is not None}


def _unpriced(plan: Plan) -> Iterator[tuple[object, ...]]:
    """Rows of usual layouts without a plan, with the reasons."""
    plans = _torch(plan)
    for name, why in unpriced_layouts(plan).items():
        if name not in plans:
            yield "", tag("b", name, class_="badge"), "", "", "", why


def _labels(plan: Plan) -> dict[str, str]:
    """Usual names of plans."""
    return {other.name: label for label, other in _torch(plan).items()} | usual_names(plan)


def _row(
    number: int, other: RunnerUp, chosen: RunnerUp, labels: dict[str, str]
) -> tuple[object, ...]:
    ratio = f"{other.step_s / chosen.step_s:.2f}×" if chosen.step_s else ""
    badge = tag("b", f" {labels[other.name]}", class_="badge") if other.name in labels else None
    times = seconds(other.step_s), ratio, size(_needed(other))
    return tag("b", number or "★"), join(other.name, badge), *times, other.why


def _chart(plan: Plan, points: Sequence[RunnerUp], labels: dict[str, str]) -> Markup:
    cap, peak = plan.memory_cap, max(_needed(point) for point in points)
    near = cap is not None and cap <= _NEAR * peak
    fast, slow = _range([point.step_s for point in points])
    least, most = _range([_needed(point) for point in points] + ([cap or 0] if near else []))

    def x(value: float) -> float:
        return round(_LEFT + (value - fast) / (slow - fast) * (_WIDE - _LEFT - 8), 1)

    def y(value: float) -> float:
        return round(_TALL - _LOW - (value - least) / (most - least) * (_TALL - _LOW - 8), 1)

    across = ((x(tick), tick_text(tick)) for tick in even_ticks(slow, 4, fast))
    up = ((y(tick), human_bytes(tick)) for tick in byte_ticks(most, 4, least))
    found = grid(across, up, (_LEFT, _WIDE - 8, _TALL - _LOW))
    if cap is not None:
        level = y(cap) if near else 8.0
        text = f"cap {human_bytes(cap)}" + ("" if near else ", above")
        beside = {"x": _WIDE - 10, "y": level - 4 if near else level + 10}
        found.append(tag("text", text, **beside, text_anchor="end", class_="cap"))
        if near:
            found.append(tag("path", d=f"M{_LEFT} {level}H{_WIDE - 8}", class_="cap"))
    placed: list[tuple[float, float]] = []
    for number, point in enumerate(points):
        at = x(point.step_s), y(_needed(point))
        label, hidden = labels.get(point.name), any(_near(at, other) for other in placed)
        placed.append(at)
        found += _point(number, point, label, *at, named=bool(label) or not hidden)
    return tag(
        "svg",
        *found,
        viewbox=f"0 0 {_WIDE} {_TALL}",
        role="img",
        aria_label="Memory and step time of the plan and of the alternatives, as in the table",
    )


def _needed(other: RunnerUp) -> int:
    """Bytes to compare with a cap; plans of older files have those of tensors alone."""
    return other.needed_bytes or other.peak_bytes


def _near(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether the numbers of two points would overlap."""
    return abs(one[0] - other[0]) < 16 and abs(one[1] - other[1]) < 10


def _point(
    number: int, point: RunnerUp, label: str | None, cx: float, cy: float, *, named: bool
) -> list[Markup]:
    """A plan, with its number if it is `named`; the two of torch with their names."""
    said = f"{point.name}: {duration(point.step_s)}, {human_bytes(_needed(point))}"
    kind = "chosen" if not number else "torch" if label else "other"
    circle = tag("circle", tag("title", said), cx=cx, cy=cy, r=5 if number else 7, class_=kind)
    text = " ".join(filter(None, (str(number) if number else "", label)))
    late = cx > _WIDE - 60
    at = {"x": cx - 9 if late else cx + 9, "y": cy + 4, "text_anchor": "end" if late else "start"}
    return [circle, tag("text", text, **at, class_="tiny")] if named and text else [circle]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Range of values with some space at both ends, at least a tenth of the largest."""
    low, high = min(values), max(values)
    room = max(0.12 * (high - low), 0.1 * high)
    return max(0.0, low - room), high + room
