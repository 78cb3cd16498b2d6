"""`scaling_page`: charts of strategies over numbers of GPUs, as one self-contained HTML file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources

from autopar.formatting import human_bytes
from autopar.report.html.figures import amount, byte_ticks, even_ticks, grid, log_ticks, share, size
from autopar.report.html.markup import Markup, join, legend, section, table, tag
from autopar.report.scaling import ScalePoint, Scaling

_WIDE, _TALL, _LEFT, _LOW = 420, 260, 66, 30
_COLOURS = 12
_NEAR = 3.0  # maximum ratio of a drawn cap to the largest value
_STYLE = """
.line { fill: none; stroke: var(--m); stroke-width: 2; }
.dot, .swatch[class*=" m"] { fill: var(--m); background: var(--m); }
.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr)); }
.ideal { fill: none; stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
"""


@dataclass(frozen=True)
class _Chart:
    """One quantity over the number of GPUs.

    Attributes:
        title: name of the quantity.
        hint: which direction is better.
        value: the quantity of a strategy's point.
        text: the quantity as text.
        ticks: tick marks up to a largest value; None for powers of ten.
        cap: limit to draw; 0 for none.
    """

    title: str
    hint: str
    value: Callable[[str, ScalePoint], float]
    text: Callable[[float], str]
    ticks: Callable[[float], list[float]] | None = even_ticks
    cap: float = 0.0

    def cap_above(self, values: Sequence[float]) -> float:
        """The limit, if it is near the values; else 0."""
        return self.cap if self.cap < _NEAR * max(values) else 0.0


def scaling_page(scaling: Scaling) -> str:
    """Renders the page."""
    looks = {name: f"m{index % _COLOURS}" for index, name in enumerate(scaling.rows)}
    figures = (_figure(chart, scaling, looks) for chart in _charts(scaling))
    failures = [tag("li", line) for line in scaling.failures()]
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", scaling.title),
        tag("style", Markup(style + _STYLE)),
    )
    charts = section(
        "charts",
        "Over the number of GPUs",
        tag("div", *figures, class_="charts"),
        legend((look, name) for name, look in looks.items()),
    )
    body = tag(
        "body",
        tag("p", "autopar", class_="brand"),
        tag("h1", scaling.title),
        tag("p", scaling.caption, class_="name"),
        tag("main", charts, section("figures", "Figures", _table(scaling))),
        tag("section", tag("h2", "Not possible"), tag("ul", *failures, class_="notes"))
        if failures
        else None,
    )
    return join(Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), Markup("\n"))


def _charts(scaling: Scaling) -> Iterable[_Chart]:
    rate = f"{scaling.unit} a second"
    yield _Chart(
        "Throughput",
        f"{rate}; dashed: as efficient as on the fewest GPUs; higher is better",
        lambda _, point: point.rate,
        lambda value: f"{value:,.0f}",
        None,
    )
    yield _Chart(
        "Efficiency",
        "throughput a GPU against the fewest GPUs; higher is better",
        scaling.efficiency,
        lambda value: f"{value:.0%}",
    )
    yield _Chart(
        "Memory of a GPU",
        "lower is better",
        lambda _, point: float(point.needed_bytes),
        human_bytes,
        byte_ticks,
        float(scaling.cap_bytes or 0),
    )
    name = scaling.cost_name
    yield _Chart(
        f"{name[0].upper()}{name[1:]}",
        "lower is better",
        lambda _, point: scaling.cost(point),
        lambda value: f"{value:.3g}",
    )


def _figure(chart: _Chart, scaling: Scaling, looks: dict[str, str]) -> Markup:
    points = list(scaling.running())
    caption = tag("figcaption", tag("b", chart.title), f": {chart.hint}")
    if not points:
        return tag("figure", caption, tag("p", "nothing runs"))
    values = [chart.value(*item) for item in points]
    sizes = sorted({point.gpus for _, point in points})
    x, y, up = _across(sizes), *_upward(chart, values)
    found = grid(((x(n), f"{n:,}") for n in sizes), up, (_LEFT, _WIDE - 12, _TALL - _LOW))
    if cap := chart.cap_above(values):
        found.append(tag("path", d=f"M{_LEFT} {y(cap)}H{_WIDE - 12}", class_="cap"))
        at = {"x": _WIDE - 14, "y": y(cap) - 4, "text_anchor": "end", "class_": "cap"}
        found.append(tag("text", "cap", **at))
    if chart.ticks is None:
        top, first = max(values), max(points, key=lambda item: item[1].rate / item[1].gpus)[1]
        ends = ((n, first.rate / first.gpus * n) for n in sizes)
        found.append(_path([(x(n), y(v)) for n, v in ends if v <= 1.05 * top], "ideal"))
    for name, look in looks.items():
        own = [(p.gpus, chart.value(name, p)) for who, p in points if who == name]
        found.append(_path([(x(n), y(v)) for n, v in own], f"line {look}"))
        for gpus, value in own:
            said = f"{name} on {gpus:,}: {chart.text(value)}"
            dot = {"cx": x(gpus), "cy": y(value), "r": 4, "class_": f"dot {look}"}
            found.append(tag("circle", tag("title", said), **dot))
    box = f"0 0 {_WIDE} {_TALL}"
    drawn = tag("svg", *found, viewbox=box, role="img", aria_label=f"{chart.title} by GPUs")
    return tag("figure", caption, drawn)


def _across(sizes: Sequence[int]) -> Callable[[float], float]:
    """Position of a number of GPUs, on a scale of doublings."""
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])
    room = _WIDE - _LEFT - 40

    def x(gpus: float) -> float:
        return round(_LEFT + 14 + (math.log2(gpus) - first) / ((last - first) or 1.0) * room, 1)

    return x


def _upward(
    chart: _Chart, values: Sequence[float]
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Position of a value, and the tick marks."""
    floor, room = _TALL - _LOW, _TALL - _LOW - 16
    if chart.ticks is None:
        least, most = math.log(min(values) / 1.3), math.log(max(values) * 1.3)

        def place(value: float) -> float:
            return round(floor - (math.log(value) - least) / (most - least) * room, 1)

        marks = log_ticks(math.exp(least), math.exp(most), 10)
    else:
        top = max(*values, chart.cap_above(values)) * 1.08

        def place(value: float) -> float:
            return round(floor - value / top * room, 1)

        marks = chart.ticks(top)
    return place, [(place(mark), chart.text(mark)) for mark in marks]


def _path(points: Sequence[tuple[float, float]], look: str) -> Markup:
    if not points:
        return Markup("")
    return tag("path", d="M" + "L".join(f"{x} {y}" for x, y in points), class_=look)


def _table(scaling: Scaling) -> Markup:
    rows: list[tuple[object, ...]] = [
        (
            name,
            f"{point.gpus:,}",
            point.plan,
            amount(point.rate),
            share(scaling.efficiency(name, point)),
            share(point.used) if point.used else "",
            size(point.needed_bytes),
            f"{scaling.cost(point):.3g}",
        )
        for name, point in scaling.running()
    ]
    headings = ("strategy", "GPUs >", "plan", f"{scaling.unit}/s >", "efficiency >", "MFU >")
    more = ("memory >", f"{scaling.cost_name} >")
    return table((*headings, *more), rows, "Predicted, for one global batch")
