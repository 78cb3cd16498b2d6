"""Section on the timeline of a step, above the memory curve, with zoom."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby

from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.report.html.figures import even_ticks, tick_text
from autopar.report.html.lanes import WIDTH, Lane, lanes_of
from autopar.report.html.markup import Markup, legend, section, tag
from autopar.report.html.memory import curve, curve_data, layers_legend

_TALL, _THIN = 26, 5  # height in pixels of full and thin rows
_LOOKS = {
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "wait": "waiting",
    "F": "F: forward",
    "B": "B: backward",
    "I": "I: gradients of inputs",
    "W": "W: gradients of parameters",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "storage_write": "write to storage",
    "storage_read": "read from storage",
    "copy_to_host": "copy to host memory",
    "copy_from_host": "copy from host memory",
}


def timeline(plan: Plan) -> Markup:
    """Renders the section; empty without a prediction."""
    p = plan.prediction
    if p is None or not p.events:
        return Markup("")
    lanes = lanes_of(p)
    tracks = list(_tracks(lanes))
    data = {
        "step": p.step_s,
        "tracks": [[_data(lane) for lane in track] for track in tracks],
        "memory": curve_data(p),
    }
    # `</script>` in a name would end the element, even inside a string of JSON.
    safe = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return section(
        "step",
        "Timeline of a step",
        tag("p", _says(plan, p), class_="lead"),
        tag(
            "figure",
            _buttons(),
            tag(
                "div",
                _axis(p.step_s),
                *(_track(track, _label(plan, track[0])) for track in tracks),
                curve(plan, p),
                class_="zoom",
                tabindex=0,
                role="group",
                aria_label="Timeline. Arrow keys move it, + and - zoom, 0 shows the whole step.",
            ),
            _legend(lanes),
            layers_legend(p),
            tag("p", class_="reading", aria_live="polite"),
        ),
        tag("script", Markup(safe), type="application/json", id="timeline"),
    )


def _says(plan: Plan, p: Prediction) -> str:
    if plan.pipeline is None:
        return (
            "The rank with the most to do: its blocks and operators, and below them the messages "
            "under way over each axis. Gaps are waits for communication."
        )
    waits = ", ".join(f"{share:.0%}" for share in p.idle)
    shades = " The shade is the stage on its rank." if plan.pipeline.stages_per_rank > 1 else ""
    return (
        f"Each rank of the pipeline ({plan.pipeline}). F3 is the forward of micro-batch 3.{shades} "
        "Thin lines are messages to neighbours. Pointing at a box marks its micro-batch on all "
        f"ranks. The ranks wait {waits} of the step."
    )


def _buttons() -> Markup:
    keys = (("-", "−", "Zoom out"), ("+", "+", "Zoom in"), ("0", "⤢", "Whole step"))
    own = (
        tag("button", sign, type="button", data_key=key, aria_label=name, title=name)
        for key, sign, name in keys
    )
    hint = tag("span", "drag to move, Ctrl + wheel or pinch to zoom", class_="hint")
    return tag("div", hint, *own, class_="buttons script")


def _axis(step_s: float) -> Markup:
    ticks = (
        tag("span", tick_text(at), style=f"left:{at / step_s * 100:.4g}%")
        for at in even_ticks(step_s, 6)
        if at < step_s * 0.97
    )
    return tag("div", tag("span", class_="label"), tag("div", *ticks, class_="ticks"), class_="row")


def _tracks(lanes: Sequence[Lane]) -> Iterable[list[Lane]]:
    """Each full row with the thin rows under it."""
    starts = accumulate(not lane.part for lane in lanes)
    for _, track in groupby(zip(starts, lanes, strict=True), key=lambda pair: pair[0]):
        yield [lane for _, lane in track]


def _top(lane: Lane) -> int:
    return 0 if not lane.part else _TALL + 1 + (lane.part - 1) * (_THIN + 1)


def _track(track: list[Lane], label: str) -> Markup:
    thin = len(track) - 1
    height = _TALL + thin * (_THIN + 1)
    plot = tag(
        "svg",
        *(path for lane in track for path in _paths(lane)),
        viewbox=f"0 0 {WIDTH} {height}",
        preserveaspectratio="none",
        style=f"height:{height}px",
        role="img",
        aria_label=f"{track[0].name}: {len(track[0].pieces)} pieces",
    )
    name = tag("span", label, class_="label", title=label)
    kind = "row plot blocks" if track[0].name == "blocks" else "row plot"
    return tag(
        "div", name, tag("div", plot, tag("div", class_="names"), class_="area"), class_=kind
    )


def _label(plan: Plan, lane: Lane) -> str:
    """Name of a row, with the stages of a pipeline rank."""
    if plan.pipeline is None or not lane.name.startswith("rank "):
        return lane.name
    stages = plan.pipeline.stages_of(int(lane.name.split()[1]))
    return f"{lane.name}, stage {', '.join(map(str, stages))}"


def _paths(lane: Lane) -> Iterable[Markup]:
    """Paths of each look, with alternating shades to tell neighbours apart."""
    top, tall = _top(lane), _THIN if lane.part else _TALL
    numbered = sorted(enumerate(lane.pieces), key=lambda item: (item[1].look, item[0] % 2))
    for (look, odd), own in groupby(numbered, key=lambda item: (item[1].look, item[0] % 2)):
        boxes = (f"M{p.start} {top}h{p.width}v{tall}h-{p.width}z" for _, p in own)
        yield tag("path", d="".join(boxes), class_=f"{look} {'odd' if odd else ''}".strip())


def _data(lane: Lane) -> dict[str, object]:
    looks = sorted({piece.look for piece in lane.pieces})
    return {
        "name": lane.name,
        "top": _top(lane),
        "looks": looks,
        "pieces": [[p.start, p.width, p.name, looks.index(p.look)] for p in lane.pieces],
    }


def _legend(lanes: Iterable[Lane]) -> Markup:
    """Legend of the colours."""
    looks = {piece.look for lane in lanes for piece in lane.pieces}
    bases = {look.split()[0] for look in looks}
    known = [(look, text) for look, text in _LOOKS.items() if look in bases]
    shades = sorted({look.split()[1] for look in looks if " s" in look})
    later = [(f"F {shade}", f"stage {shade[1:]} of a rank") for shade in shades]
    return legend([*known, *(later if len(later) > 1 else ())])
