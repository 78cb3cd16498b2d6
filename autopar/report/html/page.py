"""`page`: a plan as one self-contained HTML file."""

from __future__ import annotations

from importlib import resources

from autopar.core.plan.plan import Plan
from autopar.report.html.alternatives import runners
from autopar.report.html.markup import Markup, join, tag
from autopar.report.html.memory import memory
from autopar.report.html.mesh import mesh
from autopar.report.html.sources import sources, texts
from autopar.report.html.summary import summary
from autopar.report.html.timeline import timeline
from autopar.report.html.traffic import traffic
from autopar.report.html.waits import waits

_SECTIONS = {
    "step": ("Timeline", timeline),
    "memory": ("Memory", memory),
    "waits": ("Waits", waits),
    "others": ("Alternatives", runners),
    "mesh": ("Mesh", mesh),
    "traffic": ("Bandwidth", traffic),
    "sources": ("Sources", sources),
    "text": ("Text", texts),
}
"""Title and function of each section, by id."""


def page(plan: Plan) -> str:
    """Renders the page of a plan."""
    made = {key: make(plan) for key, (_, make) in _SECTIONS.items()}
    shown = {key: section for key, section in made.items() if section}
    links = (tag("a", _SECTIONS[key][0], href=f"#{key}") for key in shown)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{plan.model}: {plan.name}"),
        tag("style", Markup(_own("page.css"))),
    )
    body = tag(
        "body",
        summary(plan),
        tag("nav", *links, aria_label="Sections"),
        tag("main", *shown.values()),
        tag("div", class_="tip", role="tooltip", hidden=True),
        tag("script", Markup(_own("page.js"))),
    )
    return join(Markup("<!doctype html>\n"), tag("html", head, body, lang="en"), Markup("\n"))


def _own(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
