"""Section on exposed collectives and their causes."""

from __future__ import annotations

from autopar.cost_model.simulator.exposure import CAUSES, Exposure
from autopar.plan.prediction import Prediction
from autopar.plan.spec import PlanSpec
from autopar.report.html.figures import seconds, seconds_text, size
from autopar.report.html.markup import Markup, join, table, tag

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
    return tag(
        "section",
        tag("h2", "What computation waits for"),
        tag("p", *_causes(p), class_="lead"),
        table(
            ("collective", "axis", "block", "bytes >", "alone >", "exposed >", "because of"),
            [_row(item, p) for item in p.exposures],
            f"The {len(p.exposures)} that are exposed most",
        ),
        id="waits",
    )


def _causes(p: Prediction) -> list[object]:
    parts: list[object] = []
    for cause, value in p.causes.items():
        if value:
            swatch = tag("i", class_=f"swatch {_LOOKS[cause]}")
            parts.append(
                tag("span", swatch, seconds(value), f" {cause}: {_MEANS[cause]}. ", class_="cause")
            )
    return parts


def _row(item: Exposure, p: Prediction) -> tuple[object, ...]:
    most = max(other.exposed_s for other in p.exposures)
    fills = join(
        *(
            tag("i", class_=_LOOKS[cause], style=f"width:{value / most * 100:.4g}%")
            for cause, value in item.by_cause.items()
            if value
        )
    )
    said = ", ".join(f"{c} {seconds_text(s)}" for c, s in item.by_cause.items() if s)
    bar = tag("span", fills, class_="bar plain", title=said, role="img", aria_label=said)
    block = item.block or "outside of blocks"
    times = seconds(item.seconds), seconds(item.exposed_s)
    return tag("code", item.name), item.axis, block, size(item.nbytes), *times, bar
