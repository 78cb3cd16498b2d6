"""Section on memory: curve over the step, and categories at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.formatting import human_bytes
from autopar.plan.prediction import Prediction
from autopar.plan.spec import PlanSpec
from autopar.report.html.figures import byte_ticks, share, size
from autopar.report.html.lanes import WIDTH, place
from autopar.report.html.markup import Markup, join, legend, section, table, tag

_HEIGHT = 1000  # height of the curve in SVG units
_NEAR = 3.0  # maximum ratio of a drawn cap to the peak
MEANS = {
    "parameters": "what this rank holds of them",
    "optimizer": "its state",
    "gradients": "until the optimizer has stepped",
    "buffers": "of the model, and workspaces",
    "inputs": "the batch",
    "outputs": "what the model returned",
    "gathered": "whole parameters put together from shards",
    "buckets": "what collectives read and write",
    "in flight": "the same while they are under way",
    "saved": "activations that the backward reads",
    "transient": "everything else, while it is used",
}
"""Descriptions of categories, from the bottom of the curve to the top."""


def memory(plan: PlanSpec) -> Markup:
    """Renders the section; empty without a prediction."""
    p = plan.prediction
    if p is None:
        return Markup("")
    rows: list[tuple[object, ...]] = [
        (
            join(tag("i", class_=f"swatch {_look(name)}"), name),
            size(p.memory[name]),
            _bar(p.memory[name], p),
            MEANS[name],
        )
        for name in reversed(MEANS)
        if p.memory.get(name)
    ]
    caption = "At the peak, of the rank that needs most"
    headings = ("category", "bytes >", "share", "what it is")
    lead = tag("p", *_says(plan, p), class_="lead")
    return section("memory", "Memory", lead, table(headings, rows, caption))


def _says(plan: PlanSpec, p: Prediction) -> Sequence[object]:
    parts: list[object] = ["Tensors hold at most ", size(p.peak_bytes), " on a rank; "]
    parts += ["torch's allocator reserves ", size(p.reserved_bytes), " for them"]
    if p.context_bytes:
        parts += [", and the process takes ", size(p.context_bytes), " of the GPU beside that"]
    if plan.memory_cap is None:
        return [*parts, ". No cap was given."]
    room = plan.memory_cap - p.needed_bytes
    return [*parts, ". Of the cap of ", size(plan.memory_cap), " ", size(room), " stay free."]


def _bar(nbytes: int, p: Prediction) -> Markup:
    part = nbytes / p.peak_bytes if p.peak_bytes else 0.0
    fill = tag("i", style=f"width:{part * 100:.4g}%")
    return tag("span", tag("span", fill, class_="bar"), share(part), class_="bars")


def _look(name: str) -> str:
    return "c-" + name.replace(" ", "-")


def _layers(p: Prediction) -> tuple[tuple[float, ...], list[tuple[str, tuple[int, ...]]]]:
    """Times in seconds, and bytes of each category, bottom first."""
    if p.report_data.memory:
        rows = dict(p.report_data.memory)
        return p.report_data.memory_s, [(name, rows[name]) for name in MEANS if name in rows]
    times = tuple(at for at, _ in p.memory_curve)
    return times, [("tensors", tuple(nbytes for _, nbytes in p.memory_curve))]


def curve(plan: PlanSpec, p: Prediction) -> Markup | None:
    """Row of the timeline with the memory curve; None without a curve."""
    times, layers = _layers(p)
    if not times or not layers:
        return None
    cap, areas, sums = plan.memory_cap, list[Markup](), [0] * len(times)
    near = cap or 0 if (cap or 0) <= _NEAR * p.peak_bytes else 0
    most = max(p.peak_bytes, near) * 1.04
    for name, row in layers:
        sums = [below + own for below, own in zip(sums, row, strict=True)]
        areas.append(_area(name, times, sums, p.step_s, most))
    marks = [_mark(tick, most, "") for tick in byte_ticks(most / 1.04) if tick]
    line = None
    if cap is not None and cap <= most:
        line = tag("path", d=f"M0 {_y(cap, most)}H{WIDTH}", class_="cap")
        marks.append(_mark(cap, most, "cap "))
    plot = tag(
        "svg",
        *reversed(areas),
        line,
        viewbox=f"0 0 {WIDTH} {_HEIGHT}",
        preserveaspectratio="none",
        role="img",
        aria_label=f"Bytes over time; at most {human_bytes(p.peak_bytes)}",
    )
    plotted = tag("div", plot, tag("div", *marks, class_="marks"), class_="area")
    return tag("div", tag("span", "memory", class_="label"), plotted, class_="row plot memory")


def layers_legend(p: Prediction) -> Markup:
    """Legend of the curve."""
    return legend(((_look(name), name) for name, _ in reversed(_layers(p)[1])), "memory:")


def curve_data(p: Prediction) -> dict[str, Any]:
    """Data for the page's script: times, and bytes by category."""
    times, layers = _layers(p)
    return {
        "at": [place(at, p.step_s) for at in times],
        "rows": [[name, _look(name), list(row)] for name, row in layers],
    }


def _area(
    name: str, times: Sequence[float], tops: Sequence[int], step_s: float, most: float
) -> Markup:
    """Path of the area below a step function."""
    last = _y(tops[0], most)
    path = [f"M0 {_HEIGHT}V{last}"]
    for at, top in zip(times[1:], tops[1:], strict=True):
        if (y := _y(top, most)) != last:
            path.append(f"H{place(at, step_s)}V{y}")
            last = y
    return tag("path", d=f"{''.join(path)}H{WIDTH}V{_HEIGHT}z", class_=_look(name))


def _y(nbytes: float, most: float) -> int:
    return round(_HEIGHT * (1 - nbytes / most))


def _mark(nbytes: float, most: float, what: str) -> Markup:
    kind = "cap" if what else None
    style = f"top:{(1 - nbytes / most) * 100:.4g}%"
    return tag("span", f"{what}{human_bytes(nbytes)}", style=style, class_=kind)
