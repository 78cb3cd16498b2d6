"""Sections on the sources of figures, and on the plan as text and JSON."""

from __future__ import annotations

import json

from autopar.cost_model.cost import KINDS
from autopar.formatting import human_bytes
from autopar.plan.spec import PlanSpec
from autopar.report.explain import explain
from autopar.report.html.figures import count
from autopar.report.html.markup import Markup, join, tag
from autopar.report.table import table

_MOST_JSON = 250_000  # characters; longer JSON omits the fields in _DRAWN
_DRAWN = ("events", "memory_curve", "report_data")
_MEANS = {
    "measured": "timed on this machine",
    "imported": "from published tables",
    "modelled": "computed by a formula",
}


def sources(plan: PlanSpec) -> Markup:
    """Renders the section on provenance and notes."""
    p = plan.prediction
    parts: list[object] = []
    if p is not None and p.provenance:
        parts.append(_kinds({kind: p.provenance.get(kind, 0) for kind in KINDS}))
        parts.append(tag("p", "Cluster: ", plan.cluster or "not named", class_="lead"))
    notes = (tag("li", note) for note in plan.notes)
    parts.append(tag("ul", *notes, class_="notes") if plan.notes else None)
    parts.append(
        tag(
            "p",
            f"Planned by torch {plan.torch}; model {plan.model}, fingerprint ",
            tag("code", plan.fingerprint),
            f"; plan schema {plan.schema_version}.",
            class_="lead",
        )
    )
    return tag("section", tag("h2", "Where the figures come from"), *parts, id="sources")


def _kinds(kinds: dict[str, int]) -> Markup:
    total = sum(kinds.values()) or 1
    bar = tag(
        "div",
        *(tag("i", class_=f"k-{kind}", style=f"flex:{n / total:.5g}") for kind, n in kinds.items()),
        class_="goes",
        role="img",
        aria_label=", ".join(f"{n} {kind}" for kind, n in kinds.items()),
    )
    items = (
        tag("li", tag("i", class_=f"swatch k-{kind}"), count(n), f" {kind}: {_MEANS[kind]}")
        for kind, n in kinds.items()
    )
    return join(bar, tag("ul", *items, class_="legend"))


def texts(plan: PlanSpec) -> Markup:
    """Renders the section with the plan as text and JSON."""
    document, left = _document(plan)
    note = ""
    if left:
        note = f" Without {', '.join(left)}, to keep this page small: save the plan to have these."
    return tag(
        "section",
        tag("h2", "The plan, for copying"),
        _text("As text", f"{table(plan)}\n\n{explain(plan)}", ""),
        _text(f"As JSON, {human_bytes(len(document))}", document, note),
        id="text",
    )


def _text(name: str, text: str, note: str) -> Markup:
    copy = tag("button", "Copy", type="button", class_="copy script")
    return tag(
        "details",
        tag("summary", name),
        tag("p", note.strip(), class_="lead") if note else None,
        copy,
        tag("pre", text, tabindex=0),
    )


def _document(plan: PlanSpec) -> tuple[str, tuple[str, ...]]:
    """JSON of the plan, and the names of omitted fields."""
    text = json.dumps(document := plan.to_dict())
    if len(text) <= _MOST_JSON or document["prediction"] is None:
        return text, ()
    for name in _DRAWN:
        del document["prediction"][name]
    return json.dumps(document), _DRAWN
