"""Section on the runners-up."""

from __future__ import annotations

from autopar.formatting import human_bytes
from autopar.plan.prediction import Prediction, RunnerUp
from autopar.plan.spec import PlanSpec
from autopar.report.html.figures import (
    byte_ticks,
    even_ticks,
    seconds,
    seconds_text,
    size,
    tick_text,
)
from autopar.report.html.markup import Markup, table, tag

_WIDE, _TALL, _LEFT, _LOW = 340, 240, 62, 30


def runners(plan: PlanSpec) -> Markup:
    """Renders the section; empty without runners-up."""
    p, others = plan.prediction, plan.runners_up
    if p is None or not others:
        return Markup("")
    chosen = RunnerUp(plan.name, p.step_s, p.peak_bytes, "chosen")
    rows = [_row(0, chosen, p)] + [_row(i, other, p) for i, other in enumerate(others, 1)]
    return tag(
        "section",
        tag("h2", "What else was considered"),
        tag(
            "div",
            tag(
                "figure",
                tag("figcaption", "Memory over the time of a step; the chosen plan is filled"),
                _chart(plan, chosen),
            ),
            table(("", "plan", "step >", "of chosen >", "memory >", "why"), rows, "Runners-up"),
            class_="beside",
        ),
        id="others",
    )


def _row(number: int, other: RunnerUp, p: Prediction) -> tuple[object, ...]:
    ratio = f"{other.step_s / p.step_s:.2f}×" if p.step_s else ""
    step, memory = seconds(other.step_s), size(other.peak_bytes)
    mark = tag("b", number) if number else tag("b", "★")
    return mark, other.name, step, ratio, memory, other.why


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

    floor, found = _TALL - _LOW, []
    for tick in even_ticks(slowest, 4):
        found.append(tag("path", d=f"M{x(tick)} 8V{floor}", class_="grid"))
        found.append(tag("text", tick_text(tick), x=x(tick), y=floor + 16, text_anchor="middle"))
    for tick in byte_ticks(most, 4):
        found.append(tag("path", d=f"M{_LEFT} {y(tick)}H{_WIDE - 8}", class_="grid"))
        found.append(tag("text", human_bytes(tick), x=_LEFT - 6, y=y(tick) + 4, text_anchor="end"))
    if near:
        found.append(tag("path", d=f"M{_LEFT} {y(near)}H{_WIDE - 8}", class_="cap"))
        found.append(
            tag("text", "cap", x=_WIDE - 10, y=y(near) - 4, text_anchor="end", class_="cap")
        )
    for number, point in reversed(list(enumerate(points))):
        said = f"{point.name}: {seconds_text(point.step_s)}, {human_bytes(point.peak_bytes)}"
        at = x(point.step_s), y(point.peak_bytes)
        kind = "other" if number else "chosen"
        title = tag("title", said)
        found.append(tag("circle", title, cx=at[0], cy=at[1], r=5 if number else 7, class_=kind))
        if number:
            found.append(tag("text", number, x=at[0] + 8, y=at[1] + 4, class_="tiny"))
    return tag(
        "svg",
        *found,
        viewbox=f"0 0 {_WIDE} {_TALL}",
        role="img",
        aria_label="Memory and step time of the plan and of those that lost, as in the table",
    )
