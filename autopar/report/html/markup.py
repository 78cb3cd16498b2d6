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


def table(
    headings: tuple[str, ...],
    rows: Iterable[tuple[object, ...]],
    caption: str,
    total: tuple[object, ...] | None = None,
) -> Markup:
    """A table that scrolls horizontally, on phones a list of cards.

    A heading's trailing " >" marks a column of numbers. `total` is the last row.
    """
    names = [heading.removesuffix(" >") for heading in headings]
    kinds = ["number" if heading.endswith(" >") else None for heading in headings]

    def row(cells: tuple[object, ...]) -> Markup:
        columns = zip(cells, kinds, names, strict=True)
        return tag("tr", *(tag("td", c, class_=k, data_label=n) for c, k, n in columns))

    head = (tag("th", n, scope="col", class_=k) for n, k in zip(names, kinds, strict=True))
    own = tag(
        "table",
        tag("caption", caption),
        tag("thead", tag("tr", *head)),
        tag("tbody", *map(row, rows)),
        tag("tfoot", row(total)) if total is not None else None,
    )
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
