"""Section on exposed collectives and their causes."""

from __future__ import annotations

from autopar.cost_model.simulator.exposure import CAUSES, Exposure
from autopar.plan.spec import PlanSpec
from autopar.report.html.figures import seconds, seconds_text, size
from autopar.report.html.markup import Markup, section, table, tag

_LOOKS = dict(zip(CAUSES, ("g-wait", "g-memory", "g-depends"), strict=True))
_MEANS = {
    "the link": "queued behind other messages, or shared links with them",
    "memory": "sent later than it could have been, to hold less",
    "data dependence": "sent as soon as it was there, and needed at once",
}


def exposed(plan: PlanSpec) -> Markup:
    """Renders the section; empty without exposed collectives."""
    p = plan.prediction
    if p is None or not p.exposures:
        return Markup("")
    causes = (
        tag("span", swatch, seconds(value), f" {cause}: {_MEANS[cause]}. ", class_="cause")
        for cause, value in p.causes.items()
        if value
        for swatch in [tag("i", class_=f"swatch {_LOOKS[cause]}")]
    )
    headings = ("collective", "axis", "block", "bytes >", "alone >", "exposed >", "because of")
    most = max(item.exposed_s for item in p.exposures)
    rows = [_row(item, most) for item in p.exposures]
    return section(
        "waits",
        "What computation waits for",
        tag("p", *causes, class_="lead"),
        table(headings, rows, f"The {len(rows)} that are exposed most"),
    )


def _row(item: Exposure, most: float) -> tuple[object, ...]:
    parts = {cause: value for cause, value in item.by_cause.items() if value}
    fills = (
        tag("i", class_=_LOOKS[cause], style=f"width:{value / most * 100:.4g}%")
        for cause, value in parts.items()
    )
    said = ", ".join(f"{cause} {seconds_text(value)}" for cause, value in parts.items())
    bar = tag("span", *fills, class_="bar plain", title=said, role="img", aria_label=said)
    block = item.block or "outside of blocks"
    times = seconds(item.seconds), seconds(item.exposed_s)
    return tag("code", item.name), item.axis, block, size(item.nbytes), *times, bar
