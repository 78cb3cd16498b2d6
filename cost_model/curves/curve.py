"""`Curve`: measured time of one collective over message size.

Inside the measured range, log time over log size is a monotone cubic (Fritsch & Butland 1984).
Held-out sizes of 13 published nccl-tests tables come out within 3.3 % (median), 3.8 % with straight
lines. Outside the range, the time follows the first or last of up to three affine pieces fitted to
the points, scaled to join the curve at its end. SciPy's PchipInterpolator has other slopes at the
ends of the range.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from autopar.cost_model.cost import ClusterError

_UNKNOWN = 0.5  # error per octave beyond a single point: the time may stay or double
_MOST_PIECES = 3
_MOST_FITTED = 64  # most points of a fit of pieces: its cost grows with their square


@dataclass(frozen=True)
class Piece:
    """An affine stretch of a curve: `latency_s` seconds + `seconds_per_byte` a byte."""

    latency_s: float
    seconds_per_byte: float

    def __call__(self, nbytes: float) -> float:
        return self.latency_s + self.seconds_per_byte * nbytes


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes: sizes ascend, times do not fall.

    `spread` is the interquartile range of the measurements at each size in seconds; may be empty.
    """

    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self.bytes, self.seconds, self.spread)

    @classmethod
    def fit(cls, samples: Mapping[int, Sequence[float]]) -> Curve:
        """The curve through the medians of repeated timings in seconds by bytes, made monotone."""
        sizes = sorted(samples)
        for size in sizes:
            times = samples[size]
            if not times or not all(math.isfinite(t) and t > 0 for t in times):
                raise ClusterError(f"timings at {size} bytes must be positive seconds: {times!r}")
        quartiles = [np.percentile(samples[size], [25, 50, 75]) for size in sizes]
        return cls.smooth(
            [int(size) for size in sizes],
            [float(q[1]) for q in quartiles],
            [float(q[2] - q[0]) for q in quartiles],
        )

    @classmethod
    def smooth(
        cls, sizes: Sequence[int], seconds: Sequence[float], spread: Sequence[float] = ()
    ) -> Curve:
        """The non-decreasing curve nearest to noisy times.

        It has the least sum of relative differences, so a single outlier does not move it. The
        distance that a point moves is added to its spread.
        """
        _check(sizes, seconds, spread, rising=False)
        level = [math.exp(y) for y in _isotonic([math.log(t) for t in seconds])]
        moved = [2 * abs(new - old) for new, old in zip(level, seconds, strict=True)]
        widths = spread or [0.0] * len(moved)
        spreads = [width + more for width, more in zip(widths, moved, strict=True)]
        return cls(tuple(sizes), tuple(level), tuple(spreads) if spread or any(spreads) else ())

    def __call__(self, nbytes: float) -> float:
        """Seconds for a message of `nbytes` bytes."""
        if not nbytes >= 0:
            raise ClusterError(f"a message cannot have {nbytes} bytes")
        if nbytes < self.bytes[0]:
            return self._join(self.pieces[0], 0, nbytes)
        if nbytes >= self.bytes[-1]:
            return self._join(self.pieces[-1], -1, nbytes)
        at = bisect_right(self.bytes, nbytes) - 1
        x, cubic = self._cubics[at]
        d = math.log(nbytes) - x
        seconds = math.exp(((cubic[0] * d + cubic[1]) * d + cubic[2]) * d + cubic[3])
        return min(max(seconds, self.seconds[at]), self.seconds[at + 1])

    def error(self, nbytes: float) -> float:
        """Relative half-width of the error bar at `nbytes`.

        Half the spread of the adjacent sizes, plus their leave-one-out error: half of it midway
        between two sizes, and the whole again for every step of sizes beyond the range.
        """
        if not nbytes >= 0:
            raise ClusterError(f"a message cannot have {nbytes} bytes")
        if not self.bytes[0] <= nbytes <= self.bytes[-1]:
            end = 0 if nbytes < self.bytes[0] else -1
            octaves = abs(math.log2(max(1.0, nbytes) / self.bytes[end]))
            return self._noise(end) + octaves * self._drift(end)
        right = min(bisect_right(self.bytes, nbytes), len(self.bytes) - 1)
        left = max(0, right - 1)
        gap = self.bytes[right] / self.bytes[left]
        at = math.log(nbytes / self.bytes[left]) / math.log(gap) if right > left else 0.0
        noise = self._noise(left) * (1 - at) + self._noise(right) * at
        return noise + 2 * at * (1 - at) * max(self._missed[left], self._missed[right])

    def _noise(self, index: int) -> float:
        return self.spread[index] / 2 / self.seconds[index] if self.spread else 0.0

    def _drift(self, end: int) -> float:
        """Relative error for each doubling beyond an end of the range."""
        if len(self.bytes) == 1:
            return _UNKNOWN
        beside = self.bytes[1 if end == 0 else -2]
        return self._missed[end] / abs(math.log2(self.bytes[end] / beside))

    @cached_property
    def _missed(self) -> tuple[float, ...]:
        """Relative distance of each point from the curve through the others."""
        if len(self.bytes) == 1:
            return (0.0,)
        count = len(self.bytes)
        missed = []
        for i, (size, time) in enumerate(zip(self.bytes, self.seconds, strict=True)):
            near = range(count) if i in (0, count - 1) else range(max(0, i - 3), min(count, i + 4))
            rest = [j for j in near if j != i]
            others = Curve(tuple(self.bytes[j] for j in rest), tuple(self.seconds[j] for j in rest))
            missed.append(abs(others(size) / time - 1))
        return tuple(missed)

    def _join(self, piece: Piece, end: int, nbytes: float) -> float:
        """`piece` at `nbytes`, scaled to join the measured point at this end of the range."""
        return self.seconds[end] * piece(nbytes) / piece(self.bytes[end])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Up to three affine pieces over consecutive ranges of size."""
        return _fit_pieces(self.bytes, self.seconds)

    @cached_property
    def _cubics(self) -> list[tuple[float, tuple[float, float, float, float]]]:
        """Start of the cubic between each two sizes, and its coefficients, highest first."""
        xs, ys = [math.log(b) for b in self.bytes], [math.log(s) for s in self.seconds]
        slopes = _slopes(xs, ys)
        found = []
        for i, (width, slope) in enumerate(_secants(xs, ys)):
            a, b = slopes[i], slopes[i + 1]
            cubic = (a + b - 2 * slope) / width**2, (3 * slope - 2 * a - b) / width, a, ys[i]
            found.append((xs[i], cubic))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {name: list(values) for name, values in asdict(self).items()}


def _secants(xs: Sequence[float], ys: Sequence[float]) -> list[tuple[float, float]]:
    """Width and slope between adjacent points."""
    return [
        (b - a, (d - c) / (b - a))
        for (a, b), (c, d) in zip(pairwise(xs), pairwise(ys), strict=True)
    ]


def _slopes(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """Slope at each point: the weighted harmonic mean of its secants; at the ends, the secant."""
    secants = _secants(xs, ys)
    slopes = [secants[0][1]]
    for (h0, d0), (h1, d1) in pairwise(secants):
        w0, w1 = 2 * h1 + h0, h1 + 2 * h0
        slopes.append((w0 + w1) / (w0 / d0 + w1 / d1) if d0 > 0 and d1 > 0 else 0.0)
    slopes.append(secants[-1][1])
    return slopes


def _isotonic(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` in absolute differences.

    Pool adjacent violators: decreasing neighbours are replaced by their common median.
    """
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and median(pools[-2]) > median(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [level for pool in pools for level in [median(pool)] * len(pool)]


def _fit_pieces(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[Piece, ...]:
    """Splits the points into a few runs, each with the affine piece of least relative error.

    Dynamic programming finds the splits, the Bayesian information criterion their number. Three
    suffice for NCCL, whose protocols LL, LL128 and Simple are one line each.
    """
    if len(sizes) > _MOST_FITTED:
        indices = [i * (len(sizes) - 1) // (_MOST_FITTED - 1) for i in range(_MOST_FITTED)]
        sizes, seconds = [sizes[i] for i in indices], [seconds[i] for i in indices]
    count = len(sizes)
    if count == 1:
        return (Piece(0.0, seconds[0] / sizes[0]),)
    fits = list(_runs(sizes, seconds, shortest=min(count, 3)))
    best: list[dict[int, tuple[float, tuple[Piece, ...]]]] = [{0: (0.0, ())}]
    for _ in range(_MOST_PIECES):
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
        u = v = uu = uv = vv = 0.0
        for j in range(i, len(sizes)):
            p, q = 1 / seconds[j], sizes[j] / seconds[j]
            u += p
            v += q
            uu += p * p
            uv += p * q
            vv += q * q
            if (count := j + 1 - i) >= shortest:
                yield i, j + 1, *_line(count, u, v, uu, uv, vv)


def _line(count: int, u: float, v: float, uu: float, uv: float, vv: float) -> tuple[Piece, float]:
    """The a + b x nearest to times t by relative error, and its error; a and b not negative.

    Solves a p + b q = 1 for p = 1/t and q = x/t by the sums of p, q, p p, p q and q q.
    """

    def error(a: float, b: float) -> float:
        squares = a * a * uu + 2 * a * b * uv + b * b * vv
        return max(0.0, squares - 2 * (a * u + b * v) + count)

    candidates = [(u / uu, 0.0), (0.0, v / vv)]
    determinant = uu * vv - uv * uv
    if determinant > 0:
        a, b = (u * vv - v * uv) / determinant, (v * uu - u * uv) / determinant
        if a >= 0 and b >= 0:
            candidates.append((a, b))
    least, a, b = min((error(a, b), a, b) for a, b in candidates)
    return Piece(a, b), least


def _number(value: object) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value)  # type: ignore[arg-type]


def _check(
    sizes: Sequence[int], seconds: Sequence[float], spread: Sequence[float], rising: bool = True
) -> None:
    """Raises unless sizes ascend and times are positive and non-decreasing."""
    if not sizes:
        raise ClusterError("a curve needs at least one point")
    if len(seconds) != len(sizes) or len(spread) not in (0, len(sizes)):
        raise ClusterError(
            f"a curve of {len(sizes)} sizes has {len(seconds)} times and {len(spread)} spreads"
        )
    for size, time in zip(sizes, seconds, strict=True):
        if not (isinstance(size, int) and not isinstance(size, bool) and size > 0):
            raise ClusterError(f"message size {size!r} is not a positive number of bytes")
        if not (_number(time) and time > 0):
            raise ClusterError(f"the time at {size} bytes is {time!r}, not positive seconds")
    for size, width in zip(sizes, spread, strict=False):
        if not (_number(width) and width >= 0):
            raise ClusterError(f"the spread at {size} bytes is {width!r}, not seconds")
    for before, after in pairwise(sizes):
        if after <= before:
            raise ClusterError(f"message sizes must ascend, but {after} follows {before}")
    for at, (faster, slower) in enumerate(pairwise(seconds)):
        if rising and slower < faster:
            raise ClusterError(
                f"{sizes[at + 1]} bytes take {slower:g} s, less than the {faster:g} s of "
                f"{sizes[at]} bytes: clean repeated timings with Curve.fit"
            )
