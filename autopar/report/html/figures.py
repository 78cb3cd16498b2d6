"""Formatted figures, and tick marks of scales."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.formatting import duration, human_bytes
from autopar.report.html.markup import Markup, tag


def seconds(value: float) -> Markup:
    """A time; the element keeps the seconds."""
    return tag("data", duration(value), value=float(value))


def size(value: float) -> Markup:
    """A number of bytes; the element keeps the exact number."""
    return tag("data", human_bytes(value), value=round(value))


def share(value: float) -> Markup:
    """A fraction as per cent; the element keeps the fraction."""
    return tag("data", f"{value:.1%}" if value < 0.0995 else f"{value:.0%}", value=float(value))


def count(value: int) -> Markup:
    """A whole number."""
    return tag("data", f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}"), value=value)


def amount(value: float) -> Markup:
    """A number per second, to three digits, whole, or in millions; the element keeps it exactly."""
    text = f"{value:.3g}" if value < 100 else f"{value:,.0f}"
    if value >= 1e7:
        text = f"{value / 1e6:,.1f} million"
    return tag("data", text.replace(",", "\N{NARROW NO-BREAK SPACE}"), value=float(value))


def rate_text(bytes_per_s: float) -> str:
    """A bandwidth in decimal units."""
    for unit, factor in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= factor:
            return f"{bytes_per_s / factor:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def grid(
    across: Iterable[tuple[float, str]], up: Iterable[tuple[float, str]], box: tuple[int, int, int]
) -> list[Markup]:
    """Lines of a chart with left, right and lower edge `box`, each given by position and label."""
    left, right, floor = box
    found = []
    for at, label in across:
        found.append(tag("path", d=f"M{at:.1f} 8V{floor}", class_="grid"))
        found.append(tag("text", label, x=at, y=floor + 16, text_anchor="middle"))
    for at, label in up:
        found.append(tag("path", d=f"M{left} {at:.1f}H{right}", class_="grid"))
        found.append(tag("text", label, x=left - 6, y=at + 4, text_anchor="end"))
    return found


def even_ticks(most: float, about: int = 5, least: float = 0.0) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, from `least` to `most`."""
    if most <= least:
        return [least]
    rough = (most - least) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first = math.ceil(least / step * (1 - 1e-9))
    return [step * i for i in range(first, int(most / step * (1 + 1e-9)) + 1)]


def byte_ticks(most: float, about: int = 4, least: float = 0.0) -> list[float]:
    """Tick marks of bytes from `least` to `most`, even in the unit of `most`."""
    unit = 1024.0 ** max(0, math.floor(math.log(max(1.0, most), 1024)))
    return [tick * unit for tick in even_ticks(most / unit, about, least / unit)]


def log_ticks(least: float, most: float, base: int, about: int = 4) -> list[float]:
    """About `about` powers of `base` between two values, or finer steps in a narrow range."""
    first = math.ceil(math.log(least, base) - 1e-9)
    last = math.floor(math.log(most, base) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / about))
    powers = [float(base) ** power for power in range(first, last + 1, every)]
    if len(powers) > 1:
        return powers
    between = (1, 2, 5) if base == 10 else (1, 2)
    steps = (float(base) ** power * k for power in range(first - 1, last + 1) for k in between)
    found = [step for step in steps if least * (1 - 1e-9) <= step <= most * (1 + 1e-9)]
    return found or [least, most]


def tick_text(value: float) -> str:
    """A time without trailing zeros."""
    number, unit = duration(value).split(" ")
    return f"{float(number):g} {unit}"
