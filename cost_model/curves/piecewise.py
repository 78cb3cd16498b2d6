"""Affine pieces, which a curve follows outside of the measured sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_MOST = 64  # most points of a fit: its cost grows with their square


@dataclass(frozen=True)
class Piece:
    """An affine stretch of a curve: `latency_s` seconds + `seconds_per_byte` a byte."""

    latency_s: float
    seconds_per_byte: float

    def __call__(self, nbytes: float) -> float:
        return self.latency_s + self.seconds_per_byte * nbytes


def fit_pieces(sizes: Sequence[int], seconds: Sequence[float], most: int = 3) -> tuple[Piece, ...]:
    """Splits the points into up to `most` runs, each with the affine piece of least relative error.

    Dynamic programming finds the splits, the Bayesian information criterion their number. Three
    suffice for NCCL, whose protocols LL, LL128 and Simple are one line each.
    """
    if len(sizes) > _MOST:
        indices = [i * (len(sizes) - 1) // (_MOST - 1) for i in range(_MOST)]
        sizes, seconds = [sizes[i] for i in indices], [seconds[i] for i in indices]
    count = len(sizes)
    if count == 1:
        return (Piece(0.0, seconds[0] / sizes[0]),)
    fits = list(_runs(sizes, seconds, shortest=min(count, 3)))
    best: list[dict[int, tuple[float, tuple[Piece, ...]]]] = [{0: (0.0, ())}]
    for _ in range(most):
        row: dict[int, tuple[float, tuple[Piece, ...]]] = {}
        for i, j, piece, error in fits:
            if i in best[-1]:
                total = best[-1][i][0] + error
                if j not in row or total < row[j][0]:
                    row[j] = (total, (*best[-1][i][1], piece))
        best.append(row)
    whole = [row[count] for row in best[1:] if count in row]
    floor = count * 1e-6  # a relative error of 0.1 %: finer than any timing repeats
    return min(
        whole,
        key=lambda fit: count * math.log(fit[0] + floor) + 3 * len(fit[1]) * math.log(count),
    )[1]


def _runs(
    sizes: Sequence[int], seconds: Sequence[float], shortest: int
) -> Iterator[tuple[int, int, Piece, float]]:
    """The line through every run of points i..j-1, and its summed squared relative error."""
    for i in range(len(sizes)):
        sums = _Sums()
        for j in range(i, len(sizes)):
            sums.add(1 / seconds[j], sizes[j] / seconds[j])
            if sums.count >= shortest:
                yield i, j + 1, *sums.line()


class _Sums:
    """Sums for a fit of a + b x to t by least relative error, with a and b not negative.

    The fit solves a u + b v = 1 for u = 1/t and v = x/t.
    """

    def __init__(self) -> None:
        self.count = 0
        self.u = self.v = self.uu = self.uv = self.vv = 0.0

    def add(self, u: float, v: float) -> None:
        """Adds a point."""
        self.count += 1
        self.u += u
        self.v += v
        self.uu += u * u
        self.uv += u * v
        self.vv += v * v

    def line(self) -> tuple[Piece, float]:
        """The best line and its error."""
        candidates = [(self.u / self.uu, 0.0), (0.0, self.v / self.vv)]
        determinant = self.uu * self.vv - self.uv * self.uv
        if determinant > 0:
            a = (self.u * self.vv - self.v * self.uv) / determinant
            b = (self.v * self.uu - self.u * self.uv) / determinant
            if a >= 0 and b >= 0:
                candidates.append((a, b))
        error, a, b = min((self._error(a, b), a, b) for a, b in candidates)
        return Piece(a, b), error

    def _error(self, a: float, b: float) -> float:
        squares = a * a * self.uu + 2 * a * b * self.uv + b * b * self.vv
        return max(0.0, squares - 2 * (a * self.u + b * self.v) + self.count)
