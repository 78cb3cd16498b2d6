"""Section on memory: curve over the step, and categories at the peak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.formatting import human_bytes
from autopar.report.html.figures import byte_ticks, seconds, share, size
from autopar.report.html.lanes import WIDTH, place
from autopar.report.html.markup import Markup, join, legend, section, table, tag

_HEIGHT = 1000  # height of the curve in SVG units
_NEAR = 3.0  # maximum ratio of a drawn cap to the peak
MEANS = {
    "parameters": "what this rank holds of them",
    "optimizer": "moments of AdamW, or those of another optimizer",
    "gradients": "until the optimizer has stepped",
    "buffers": "of the model, and workspaces",
    "inputs": "the batch",
    "outputs": "what the model returned",
    "gathered": "whole parameters put together from shards",
    "buckets": "inputs and outputs of collectives, before and after",
    "in flight": "inputs and outputs of collectives under way",
    "saved": "kept by the forward for the backward",
    "transient": "everything else, while it is used",
}
"""Descriptions of categories, from the bottom of the curve to the top."""

SHOWN = {"saved": "activations", "optimizer": "optimizer state"}
"""Categories that are shown under other names."""


def memory(plan: Plan) -> Markup:
    """Renders the section; empty without a prediction."""
    p = plan.prediction
    if p is None:
        return Markup("")
    rows = [
        (join(tag("i", class_=f"swatch {_look(n)}"), shown(n)), size(b), _bar(b, p), MEANS[n])
        for n, b in sorted(p.memory.items(), key=lambda item: -item[1])
        if b
    ]
    caption = "What the rank that needs most holds at the peak"
    headings = ("category", "bytes >", "share", "what it is")
    lead = tag("p", *_says(plan, p), class_="lead")
    total = ("total", size(p.peak_bytes), _bar(p.peak_bytes, p), "all tensors")
    return section("memory", "Memory", lead, table(headings, rows, caption, total))


def shown(name: str) -> str:
    """The name of a category on the page and in traces."""
    return SHOWN.get(name, name)


def _says(plan: Plan, p: Prediction) -> Sequence[object]:
    at_s = peak_s(p)
    parts: list[object] = ["Tensors hold at most ", size(p.peak_bytes), " on a rank"]
    when = (seconds(at_s), " into the step") if at_s else ("at the start of the step",)
    parts += [" (", *when, *_during(p, at_s), "); "]
    parts += ["torch's allocator reserves ", size(p.reserved_bytes), " for them"]
    if p.context_bytes:
        parts += [", and the process takes ", size(p.context_bytes), " of the GPU beside that"]
    if plan.memory_cap is None:
        return [*parts, ". No cap was given."]
    room = plan.memory_cap - p.needed_bytes
    return [*parts, ". ", size(room), " of the cap of ", size(plan.memory_cap), " stay free."]


def peak_s(p: Prediction) -> float:
    """Time of the peak, in seconds."""
    times, layers = _layers(p)
    totals = [sum(column) for column in zip(*(row for _, row in layers), strict=True)]
    return times[totals.index(max(totals))] if totals else 0.0


def _during(p: Prediction, at_s: float) -> tuple[object, ...]:
    """The block that runs at a time."""
    for block, phase, start_s, end_s in p.report_data.spans:
        if start_s <= at_s < end_s:
            return (f", in the {phase} of {block or 'what is outside of blocks'}",)
    return ()


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


def curve(plan: Plan, p: Prediction) -> Markup | None:
    """Row of the timeline with the memory curve; None without a curve."""
    times, layers = _layers(p)
    if not times or not layers:
        return None
    cap, areas, sums = plan.memory_cap, list[Markup](), [0] * len(times)
    near = cap or 0 if (cap or 0) <= _NEAR * p.peak_bytes else 0
    most = max(p.peak_bytes, near) * 1.2
    for name, row in layers:
        sums = [below + own for below, own in zip(sums, row, strict=True)]
        areas.append(_area(name, times, sums, p.step_s, most))
    marks = [_mark(tick, most, human_bytes(tick)) for tick in byte_ticks(most / 1.2) if tick]
    lines = [tag("path", d=f"M{(at := place(peak_s(p), p.step_s))} 0V{_HEIGHT}", class_="peak")]
    peak = f"tensors {human_bytes(p.peak_bytes)}"
    left = f"left:{at / WIDTH * 100:.4g}%;top:{(1 - p.peak_bytes / most) * 100:.4g}%"
    side, other = ("peak before", "cap") if at > WIDTH / 2 else ("peak", "cap left")
    marks.append(tag("span", tag("i", peak), class_=side, style=left, data_at=at))
    if cap is not None and near:
        lines.append(tag("path", d=f"M0 {_y(cap, most)}H{WIDTH}", class_="cap"))
        marks.append(_mark(cap, most, f"cap {human_bytes(cap)}", other))
    elif cap is not None:
        marks.append(_mark(most, most, f"cap {human_bytes(cap)}, above", other))
    plot = tag(
        "svg",
        *reversed(areas),
        *lines,
        viewbox=f"0 0 {WIDTH} {_HEIGHT}",
        preserveaspectratio="none",
        role="img",
        aria_label=f"Bytes over time; at most {human_bytes(p.peak_bytes)}",
    )
    plotted = tag("div", plot, tag("div", *marks, class_="marks"), class_="area")
    return tag("div", tag("span", "memory", class_="label"), plotted, class_="row plot memory")


def layers_legend(p: Prediction) -> Markup:
    """Legend of the curve."""
    return legend(((_look(name), shown(name)) for name, _ in reversed(_layers(p)[1])), "memory:")


def curve_data(p: Prediction) -> dict[str, Any]:
    """Data for the page's script: times, and bytes by category."""
    times, layers = _layers(p)
    return {
        "at": [place(at, p.step_s) for at in times],
        "rows": [[shown(name), list(row)] for name, row in layers],
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


def _mark(nbytes: float, most: float, text: str, kind: str | None = None) -> Markup:
    style = f"top:{(1 - nbytes / most) * 100:.4g}%"
    return tag("span", tag("i", text), style=style, class_=kind)
