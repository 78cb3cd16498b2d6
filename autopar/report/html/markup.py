"""`tag`: HTML and SVG elements; children that are not `Markup` are escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable

_VOID = ("meta", "br", "hr")


class Markup(str):
    """Text that needs no escaping."""

    __slots__ = ()


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element; children and attributes that are None are omitted.

    Args:
        name: name of the element.
        children: markup, or values to print as text.
        attributes: attributes by name, with "class_" for "class" and "_" for "-"; True for an
            attribute without a value.
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(*children)}</{name}>")


def join(*children: object) -> Markup:
    """Concatenates children."""
    return Markup("".join(_child(child) for child in children if child is not None))


def table(headings: tuple[str, ...], rows: list[tuple[object, ...]], caption: str) -> Markup:
    """A table that scrolls horizontally; a heading's trailing " >" marks a column of numbers."""
    right = [heading.endswith(" >") for heading in headings]
    names = [heading.removesuffix(" >") for heading in headings]
    kinds = ["number" if number else None for number in right]
    head = (tag("th", n, scope="col", class_=k) for n, k in zip(names, kinds, strict=True))
    body = (
        tag("tr", *(tag("td", cell, class_=k) for cell, k in zip(row, kinds, strict=True)))
        for row in rows
    )
    own = tag("table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", *body))
    return tag("div", own, class_="scroll", tabindex=0, role="region", aria_label=caption)


def section(key: str, title: str, *children: object) -> Markup:
    """A section of the page with a heading."""
    return tag("section", tag("h2", title), *children, id=key)


def legend(items: Iterable[tuple[object, ...]], name: str | None = None) -> Markup:
    """A legend: CSS class and text of each colour, with an optional name."""
    rows = (tag("li", tag("i", class_=f"swatch {look}"), *text) for look, *text in items)
    return tag("ul", tag("li", name) if name else None, *rows, class_="legend")


def _child(child: object) -> str:
    return child if isinstance(child, Markup) else html.escape(str(child), quote=False)


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    name = {"viewbox": "viewBox", "preserveaspectratio": "preserveAspectRatio"}.get(name, name)
    if value is None or value is False:
        return ""
    if value is True:
        return f" {name}"
    text = f"{value:.7g}" if isinstance(value, float) else str(value)
    return f' {name}="{html.escape(text)}"'
