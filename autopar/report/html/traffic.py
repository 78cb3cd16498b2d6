"""Section on messages: bandwidth by message size, and the messages of a step.

Bandwidth rises until the link is saturated, as in a roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.core.plan.plan import Plan
from autopar.core.plan.report_data import Traffic
from autopar.formatting import duration, human_bytes
from autopar.report.html.figures import (
    count,
    grid,
    log_ticks,
    rate_text,
    seconds,
    size,
)
from autopar.report.html.markup import Markup, section, table, tag

_MOST = 9  # maximum number of charts; the table lists all collectives
_WIDE, _TALL, _LEFT, _LOW = 340, 210, 58, 24  # size and margins of a chart

Scale = Callable[[float], float]


def traffic(plan: Plan) -> Markup:
    """Renders the section; empty without messages or a prediction."""
    p = plan.prediction
    items = p.report_data.traffic if p is not None else ()
    if not items:
        return Markup("")
    order = sorted(items, key=_seconds, reverse=True)
    headings = ("collective", "over", "groups", "messages >", "bytes >", "alone >", "times are")
    caption = "Messages of a rank in a step; times of each alone"
    sums = count(sum(map(_messages, items))), size(sum(map(_bytes, items)))
    total = "total", "", "", *sums, seconds(sum(map(_seconds, items))), ""
    return section(
        "traffic",
        "Bandwidth by message size",
        tag(
            "p",
            "Rings are timed messages, the line is the curve that prices messages, with its error. "
            "Dots are the messages of this plan, larger where they take longer.",
            class_="lead",
        ),
        tag("div", *(_figure(item) for item in order[:_MOST]), class_="charts"),
        table(headings, map(_row, order), caption, total),
    )


def _messages(item: Traffic) -> int:
    return sum(times for _, times, _ in item.sent)


def _bytes(item: Traffic) -> int:
    return sum(nbytes * times for nbytes, times, _ in item.sent)


def _seconds(item: Traffic) -> float:
    return sum(times * each for _, times, each in item.sent)


def _row(item: Traffic) -> tuple[object, ...]:
    origin = item.provenance if len(item.provenance) < 120 else item.provenance[:117] + "…"
    what = f"{item.collective.replace('_', '-')}, {item.dtype}", item.axis, item.groups
    source = tag("span", origin, title=item.provenance)
    return *what, count(_messages(item)), size(_bytes(item)), seconds(_seconds(item)), source


def _figure(item: Traffic) -> Markup:
    name = f"{item.collective.replace('_', '-')} over {item.axis}"
    return tag(
        "figure",
        tag("figcaption", tag("b", name), " ", tag("small", f"{item.groups}, {item.dtype}")),
        _chart(item, name),
    )


def _chart(item: Traffic, name: str) -> Markup:
    points = [(n, n / s) for n, s, _ in item.modelled] + [(n, n / s) for n, s in item.measured]
    points += [(max(n, 1), max(n, 1) / s) for n, _, s in item.sent if s > 0]
    sizes, rates = [n for n, _ in points], [rate for _, rate in points]
    x, y = _scale(sizes, _LEFT, _WIDE - 10), _scale(rates, _TALL - _LOW, 12)
    size_ticks = log_ticks(min(sizes), max(sizes), 4, 5)
    rate_ticks = log_ticks(min(rates), max(rates) * 1.2, 10, 5)
    across = [(x(tick), human_bytes(tick).replace(".0 ", " ")) for tick in size_ticks]
    up = [(y(tick), rate_text(tick)) for tick in rate_ticks]
    return tag(
        "svg",
        *grid(across, up, (_LEFT, _WIDE - 6, _TALL - _LOW)),
        _band(item, x, y),
        tag("path", d=_line([(x(n), y(n / s)) for n, s, _ in item.modelled]), class_="model"),
        *(tag("circle", cx=x(n), cy=y(n / s), r=2.5, class_="timed") for n, s in item.measured),
        *_sent(item, x, y),
        viewbox=f"0 0 {_WIDE} {_TALL}",
        role="img",
        aria_label=f"{name}: bytes per second over the size of a message",
    )


def _scale(values: Sequence[float], low: float, high: float) -> Scale:
    """Logarithmic scale with some space at both ends."""
    least, most = math.log(min(values)), math.log(max(values))
    room = max(0.03 * (most - least), 0.2)
    least, span = least - room, most - least + 2 * room
    return lambda value: low + (math.log(max(value, 1e-9)) - least) / span * (high - low)


def _line(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _band(item: Traffic, x: Scale, y: Scale) -> Markup | None:
    """Error band of the curve."""
    if not any(error for _, _, error in item.modelled):
        return None
    upper = [(x(n), y(n / s * (1 + error))) for n, s, error in item.modelled]
    lower = [(x(n), y(n / s / (1 + error))) for n, s, error in item.modelled]
    edge = [(a, min(max(b, 4.0), _TALL - _LOW)) for a, b in [*upper, *reversed(lower)]]
    return tag("path", d=_line(edge) + "z", class_="band")


def _sent(item: Traffic, x: Scale, y: Scale) -> list[Markup]:
    total = _seconds(item) or 1.0
    found = []
    for nbytes, times, each in sorted(item.sent, key=lambda row: -row[1] * row[2]):
        said = f"{times} × {human_bytes(nbytes)}, {duration(each)} each"
        radius = 3.0 + 7.0 * math.sqrt(times * each / total)
        rate = nbytes / each if each > 0 else 0.0
        at = {"cx": round(x(nbytes), 1), "cy": round(y(rate), 1), "r": round(radius, 1)}
        found.append(tag("circle", tag("title", said), class_="sent", **at))
    return found
