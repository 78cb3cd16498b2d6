"""Section on the runners-up."""

from __future__ import annotations

from autopar.formatting import human_bytes
from autopar.plan.prediction import Prediction, RunnerUp
from autopar.plan.spec import PlanSpec
from autopar.report.html.figures import (
    byte_ticks,
    even_ticks,
    grid,
    seconds,
    seconds_text,
    size,
    tick_text,
)
from autopar.report.html.markup import Markup, section, table, tag

_WIDE, _TALL, _LEFT, _LOW = 340, 240, 62, 30


def runners(plan: PlanSpec) -> Markup:
    """Renders the section; empty without runners-up."""
    p, others = plan.prediction, plan.runners_up
    if p is None or not others:
        return Markup("")
    chosen = RunnerUp(plan.name, p.step_s, p.peak_bytes, "chosen")
    rows = [_row(0, chosen, p)] + [_row(i, other, p) for i, other in enumerate(others, 1)]
    caption = tag("figcaption", "Memory over the time of a step; the chosen plan is filled")
    figure = tag("figure", caption, _chart(plan, chosen))
    listed = table(("", "plan", "step >", "of chosen >", "memory >", "why"), rows, "Runners-up")
    return section(
        "others", "What else was considered", tag("div", figure, listed, class_="beside")
    )


def _row(number: int, other: RunnerUp, p: Prediction) -> tuple[object, ...]:
    ratio = f"{other.step_s / p.step_s:.2f}×" if p.step_s else ""
    step, memory = seconds(other.step_s), size(other.peak_bytes)
    return tag("b", number or "★"), other.name, step, ratio, memory, other.why


def _chart(plan: PlanSpec, chosen: RunnerUp) -> Markup:
    cap, points = plan.memory_cap, (chosen, *plan.runners_up)
    slowest = max(point.step_s for point in points) * 1.08
    peak = max(point.peak_bytes for point in points)
    near = cap if cap is not None and cap < 3 * peak else 0
    most = max(peak, near) * 1.1

    def x(value: float) -> float:
        return round(_LEFT + value / slowest * (_WIDE - _LEFT - 8), 1)

    def y(value: float) -> float:
        return round(_TALL - _LOW - value / most * (_TALL - _LOW - 8), 1)

    across = ((x(tick), tick_text(tick)) for tick in even_ticks(slowest, 4))
    up = ((y(tick), human_bytes(tick)) for tick in byte_ticks(most, 4))
    found = grid(across, up, (_LEFT, _WIDE - 8, _TALL - _LOW))
    if near:
        at = {"x": _WIDE - 10, "y": y(near) - 4}
        found.append(tag("path", d=f"M{_LEFT} {y(near)}H{_WIDE - 8}", class_="cap"))
        found.append(tag("text", "cap", **at, text_anchor="end", class_="cap"))
    for number, point in reversed(list(enumerate(points))):
        said = f"{point.name}: {seconds_text(point.step_s)}, {human_bytes(point.peak_bytes)}"
        cx, cy, title = x(point.step_s), y(point.peak_bytes), tag("title", said)
        radius, kind = (5, "other") if number else (7, "chosen")
        found.append(tag("circle", title, cx=cx, cy=cy, r=radius, class_=kind))
        if number:
            found.append(tag("text", number, x=cx + 8, y=cy + 4, class_="tiny"))
    return tag(
        "svg",
        *found,
        viewbox=f"0 0 {_WIDE} {_TALL}",
        role="img",
        aria_label="Memory and step time of the plan and of those that lost, as in the table",
    )
