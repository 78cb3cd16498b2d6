"""The sizes at which one algorithm overtakes another, in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import sympy

from autopar.cost_model.algorithms.formulas import Formula, figures_of, parts_of
from autopar.cost_model.topology.link_levels import Levels


def crossover(first: Formula, second: Formula, ranks: int, nodes: int) -> tuple[sympy.Expr, ...]:
    """The sizes S at which two algorithms take equally long, in closed form.

    A time is c0 + c1 √S + c2 S with coefficients free of S, so these are the squares of the roots
    of a quadratic: expressions in alpha, beta, alpha_N and beta_N. Which of them are real and
    positive depends on the figures: see `crossovers`.
    """
    both = zip(
        parts_of(first.seconds, ranks, nodes), parts_of(second.seconds, ranks, nodes), strict=True
    )
    parts = [sympy.expand(one - other) for one, other in both]
    unknown, names = sympy.Symbol("x"), sympy.symbols("c0 c1 c2")
    present = tuple(part != 0 for part in parts)
    values = dict(zip(names, parts, strict=True))
    return tuple(dict.fromkeys(root.subs(values) for root in _squares(unknown, names, present)))


def crossovers(
    first: Formula, second: Formula, ranks: int, nodes: int, levels: Levels
) -> dict[float, sympy.Expr]:
    """The sizes in bytes, ascending, at which the faster of two algorithms changes.

    Returns:
        The values of `crossover` with these figures that are real and positive, and at which the
        sign of the difference changes, each with its expression.
    """

    def gap(size: float) -> float:
        return first(size, ranks, nodes, levels) - second(size, ranks, nodes, levels)

    figures = {name: sympy.Rational(x) for name, x in figures_of(levels).items()}
    values = {e: e.subs(figures).evalf(30) for e in crossover(first, second, ranks, nodes)}
    sizes = {float(x): e for e, x in values.items() if x.is_finite and x.is_positive}
    return {x: sizes[x] for x in sorted(sizes) if gap(0.99 * x) * gap(1.01 * x) < 0}


@cache
def _squares(unknown: Any, names: Any, present: tuple[bool, ...]) -> tuple[Any, ...]:
    """The squares of the roots of c0 + c1 x + c2 x², those coefficients that are not present 0."""
    terms = (c * unknown**n for n, c in enumerate(names) if present[n])
    return tuple(root**2 for root in sympy.solve(sum(terms), unknown))


def fastest(
    ways: Sequence[Formula], ranks: int, nodes: int, levels: Levels
) -> list[tuple[str, float, float | None]]:
    """Which algorithm is the fastest from which size to which, None for without end."""
    sizes = {
        size
        for i, first in enumerate(ways)
        for second in ways[i + 1 :]
        for size in crossovers(first, second, ranks, nodes, levels)
    }
    edges = [0.0, *sorted(sizes)]
    middles = [(low + high) / 2 for low, high in pairwise(edges)] + [edges[-1] * 2 + 1]
    found: list[tuple[str, float, float | None]] = []
    for low, middle in zip(edges, middles, strict=True):
        name = min(ways, key=lambda w: w(middle, ranks, nodes, levels)).algorithm
        if found and found[-1][0] == name:
            continue
        if found:
            found[-1] = (*found[-1][:2], low)
        found.append((name, low, None))
    return found
