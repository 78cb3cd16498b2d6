"""Sections on the sources of figures, and on the plan as text and JSON."""

from __future__ import annotations

import json

from autopar.core.plan.plan import Plan
from autopar.cost_model.cost import KINDS
from autopar.formatting import human_bytes
from autopar.report.error_bars import memory_interval, step_interval
from autopar.report.explain import explain
from autopar.report.html.figures import count
from autopar.report.html.markup import Markup, join, legend, section, tag
from autopar.report.table import table

_MOST_JSON = 250_000  # characters; longer JSON omits the fields in _DRAWN
_DRAWN = ("events", "memory_curve", "report_data")
_MEANS = {
    "measured": "timed on this machine",
    "imported": "from published tables",
    "modelled": "computed by a formula",
}


def sources(plan: Plan) -> Markup:
    """Renders the section on provenance and notes."""
    p = plan.prediction
    parts: list[object] = []
    if p is not None and p.provenance:
        parts.append(_kinds({kind: n for kind in KINDS if (n := p.provenance.get(kind))}))
        parts.append(tag("p", "Cluster: ", plan.cluster or "not named", class_="lead"))
    if p is not None:
        step, memory = step_interval(p), memory_interval(p)
        times = f"Times (“… to …”): nine in ten of {step.source}. "
        sizes = f"Memory: nine in ten of {memory.source}."
        parts.append(tag("p", times, sizes, class_="lead"))
    if plan.notes:
        parts.append(tag("ul", *(tag("li", note) for note in plan.notes), class_="notes"))
    parts.append(
        tag(
            "p",
            f"Planned by torch {plan.torch}; model {plan.model}, fingerprint ",
            tag("code", plan.fingerprint),
            f"; plan schema {plan.schema_version}.",
            class_="lead",
        )
    )
    return section("sources", "Sources of the figures", *parts)


def _kinds(kinds: dict[str, int]) -> Markup:
    total = sum(kinds.values()) or 1
    bar = tag(
        "div",
        *(tag("i", class_=f"k-{kind}", style=f"flex:{n / total:.5g}") for kind, n in kinds.items()),
        class_="goes",
        role="img",
        aria_label=", ".join(f"{n} {kind}" for kind, n in kinds.items()),
    )
    rows = ((f"k-{kind}", count(n), f" {kind}: {_MEANS[kind]}") for kind, n in kinds.items())
    return join(bar, legend(rows))


def texts(plan: Plan) -> Markup:
    """Renders the section with the plan as text and JSON."""
    text, note = json.dumps(document := plan.to_dict()), None
    if len(text) > _MOST_JSON and document["prediction"] is not None:
        for name in _DRAWN:
            del document["prediction"][name]
        text = json.dumps(document)
        left = f"Without {', '.join(_DRAWN)}, to keep this page small"
        note = tag("p", f"{left}: save the plan to have these.", class_="lead")
    return section(
        "text",
        "The plan as text",
        _text("Text", f"{table(plan)}\n\n{explain(plan)}"),
        _text(f"JSON, {human_bytes(len(text))}", text, note),
    )


def _text(name: str, text: str, note: Markup | None = None) -> Markup:
    copy = tag("button", "Copy", type="button", class_="copy script")
    return tag("details", tag("summary", name), note, copy, tag("pre", text, tabindex=0))
