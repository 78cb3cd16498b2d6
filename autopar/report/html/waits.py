"""Section on waits: stalls of compute for collectives, by block and kind of collective."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.core.exposure import CAUSES, Exposure
from autopar.core.plan.plan import Plan
from autopar.core.plan.prediction import Prediction
from autopar.formatting import duration
from autopar.report.html.figures import count, seconds, size
from autopar.report.html.lanes import place
from autopar.report.html.markup import Markup, section, table, tag

_LOOKS = dict(zip(CAUSES, ("g-wait", "g-memory", "g-depends"), strict=True))
_MEANS = {
    "the link": "queued behind other messages, or shared links with them",
    "memory": "sent later than it could have been, to hold less",
    "data dependence": "sent as soon as it was there, and needed at once",
}


def waits(plan: Plan) -> Markup:
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
    groups: dict[tuple[str, str, str], list[Exposure]] = {}
    for item in p.exposures:
        groups.setdefault((item.collective, item.axis, item.block), []).append(item)
    order = sorted(groups.values(), key=lambda own: -_exposed_s(own))
    most, known = _exposed_s(order[0]), _exposed_s(p.exposures)
    rows = [_row(p, own, most) for own in order]
    total = max(known, sum(p.waits.values()))
    if total - known > 1e-3 * total:
        rest = "further collectives" + (" and micro-batches" if p.stages else "")
        rows.append((rest, "", "", "", "", seconds(total - known), "", ""))
    headings = "collective", "axis", "block", "calls >", "bytes >", "waits >", "because of", "when"
    end = "total", "", "", "", "", seconds(total), "", ""
    columns = len(headings) if any(row[-1] for row in rows) else -1  # a pipeline has no links
    return section(
        "waits",
        "Waits for messages",
        tag("p", *causes, class_="lead"),
        table(
            headings[:columns],
            [row[:columns] for row in rows],
            "Waits of compute by block and kind",
            end[:columns],
        ),
    )


def _exposed_s(items: Iterable[Exposure]) -> float:
    return sum(item.exposed_s for item in items)


def _row(p: Prediction, items: Sequence[Exposure], most: float) -> tuple[object, ...]:
    one = items[0]
    parts = {cause: sum(item.by_cause[cause] for item in items) for cause in CAUSES}
    parts = {cause: value for cause, value in parts.items() if value}
    fills = (
        tag("i", class_=_LOOKS[cause], style=f"width:{value / most * 100:.4g}%")
        for cause, value in parts.items()
    )
    said = ", ".join(f"{cause} {duration(value)}" for cause, value in parts.items())
    bar = tag("span", *fills, class_="bar plain", title=said, role="img", aria_label=said)
    names = one.collective.replace("_", "-"), one.axis, one.block or "outside of blocks"
    figures = count(len(items)), size(sum(i.nbytes for i in items)), seconds(_exposed_s(items))
    return *names, *figures, bar, _link(p, items) or ""


def _link(p: Prediction, items: Sequence[Exposure]) -> Markup | None:
    """Link to the collectives on the timeline, if they are there."""
    names = {item.name for item in items}
    spans = [(start_s, end_s) for name, _, start_s, end_s, _ in p.events if name in names]
    if not spans:
        return None
    start_s, end_s = min(s for s, _ in spans), max(e for _, e in spans)
    data = {"data_from": place(start_s, p.step_s), "data_to": place(end_s, p.step_s)}
    when = f"from {duration(start_s)}"
    return tag("a", when, href="#step", class_="when", title="Show on the timeline", **data)
