"""`Curve`: the time of one collective over message size, as measured.

Inside the measured range the logarithm of time is interpolated over the logarithm of size, which
predicts held-out sizes of published nccl-tests tables within 3.3 % (median over 27 tables; one
line: 14.3 %). Outside it the time follows the first or the last of up
to three affine pieces fitted to the points, shifted to join the curve at its end.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from autopar.cost_model.cost import ClusterError


@dataclass(frozen=True)
class Piece:
    """An affine stretch of a curve: `latency_s` seconds + `seconds_per_byte` a byte."""

    latency_s: float
    seconds_per_byte: float

    def __call__(self, nbytes: float) -> float:
        return self.latency_s + self.seconds_per_byte * nbytes


@dataclass(frozen=True)
class Curve:
    """Seconds over bytes, never falling.

    Attributes:
        bytes: message sizes, ascending.
        seconds: the time at each size, never falling.
        spread: seconds between the quartiles of the measurements at each size; may be empty.
    """

    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    spread: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check(self.bytes, self.seconds, self.spread)

    @classmethod
    def fit(cls, samples: Mapping[int, Sequence[float]]) -> Curve:
        """The curve through the medians of repeated timings, made monotone.

        Args:
            samples: timings in seconds by message size in bytes.
        """
        sizes = sorted(samples)
        for size in sizes:
            times = samples[size]
            if not times or not all(math.isfinite(t) and t > 0 for t in times):
                raise ClusterError(f"timings at {size} bytes must be positive seconds: {times!r}")
        quartiles = [np.percentile(samples[size], [25, 50, 75]) for size in sizes]
        seconds = np.exp(_rising([math.log(q[1]) for q in quartiles]))
        spread = tuple(float(q[2] - q[0]) for q in quartiles)
        return cls(tuple(int(s) for s in sizes), tuple(float(t) for t in seconds), spread)

    def __call__(self, nbytes: float) -> float:
        """Seconds for a message of `nbytes` bytes."""
        if not nbytes >= 0:
            raise ClusterError(f"a message cannot have {nbytes} bytes")
        first, last = self.bytes[0], self.bytes[-1]
        if nbytes < first:
            return self._join(self.pieces[0], 0, nbytes)
        if nbytes >= last:
            return self._join(self.pieces[-1], -1, nbytes)
        xs, ys = self._logarithms
        right = bisect_right(self.bytes, nbytes)
        x0, x1, y0, y1 = xs[right - 1], xs[right], ys[right - 1], ys[right]
        return math.exp(y0 + (y1 - y0) * (math.log(nbytes) - x0) / (x1 - x0))

    def error(self, nbytes: float) -> float:
        """Relative half-width of the error bar at `nbytes`: half the spread of the nearest size."""
        if not self.spread:
            return 0.0
        near = min(range(len(self.bytes)), key=lambda i: abs(self.bytes[i] - nbytes))
        return self.spread[near] / 2 / self.seconds[near]

    def _join(self, piece: Piece, end: int, nbytes: float) -> float:
        """`piece` at `nbytes`, scaled to meet the measured point at this end of the range."""
        return self.seconds[end] * piece(nbytes) / piece(self.bytes[end])

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Up to three affine pieces over consecutive ranges of size."""
        return fit_pieces(self.bytes, self.seconds)

    @cached_property
    def _logarithms(self) -> tuple[list[float], list[float]]:
        return [math.log(b) for b in self.bytes], [math.log(s) for s in self.seconds]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "bytes": list(self.bytes),
            "seconds": list(self.seconds),
            "spread": list(self.spread),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Curve:
        """The curve that `to_dict` wrote."""
        if not isinstance(data, Mapping) or set(data) != {"bytes", "seconds", "spread"}:
            raise ClusterError(f"a curve has bytes, seconds and spread, this has {_keys(data)}")
        return cls(tuple(data["bytes"]), tuple(data["seconds"]), tuple(data["spread"]))


def _rising(values: Sequence[float]) -> Any:
    """The never falling sequence nearest to `values` in squares (isotonic regression, min-max)."""
    count, sums = len(values), np.concatenate([[0.0], np.cumsum(values)])
    nearest = [
        max(
            min((sums[k] - sums[j]) / (k - j) for k in range(i + 1, count + 1))
            for j in range(i + 1)
        )
        for i in range(count)
    ]
    return np.maximum.accumulate(nearest)  # equal neighbours may differ in the last bit


def _keys(data: object) -> str:
    return ", ".join(map(str, data)) if isinstance(data, Mapping) else type(data).__name__


def _number(value: object) -> bool:
    real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return real and math.isfinite(value)  # type: ignore[arg-type]


def _check(sizes: tuple[int, ...], seconds: tuple[float, ...], spread: tuple[float, ...]) -> None:
    """Raise where the table is not one of ascending sizes and positive, never falling times."""
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
        if slower < faster:
            raise ClusterError(
                f"{sizes[at + 1]} bytes take {slower:g} s, less than the {faster:g} s of "
                f"{sizes[at]} bytes: clean repeated timings with Curve.fit"
            )


def fit_pieces(sizes: Sequence[int], seconds: Sequence[float], most: int = 3) -> tuple[Piece, ...]:
    """Cut the points into at most `most` runs, one affine piece each, by least relative error.

    The cuts are found by dynamic programming; how many, by the Bayesian information criterion.
    """
    count = len(sizes)
    if count == 1:
        return (Piece(0.0, seconds[0] / sizes[0]),)
    x, t = np.array(sizes, dtype=float), np.array(seconds, dtype=float)
    shortest = 2 if count < 6 else 3
    fits = {
        (i, j): _affine(x[i:j], t[i:j])
        for i in range(count)
        for j in range(i + shortest, count + 1)
    }
    best: list[dict[int, tuple[float, tuple[Piece, ...]]]] = [{0: (0.0, ())}]
    for _ in range(most):
        row: dict[int, tuple[float, tuple[Piece, ...]]] = {}
        for (i, j), (piece, error) in fits.items():
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


def _affine(x: Any, t: Any) -> tuple[Piece, float]:
    """The line with least squared relative error, neither coefficient negative, and that error."""
    u, v = 1 / t, x / t  # find a, b >= 0 with a u + b v = 1
    uu, uv, vv, su, sv = u @ u, u @ v, v @ v, u.sum(), v.sum()
    determinant = uu * vv - uv * uv
    candidates = [(su / uu, 0.0), (0.0, sv / vv)]
    if determinant > 0:
        a, b = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
        if a >= 0 and b >= 0:
            candidates.append((a, b))
    error, a, b = min((float(((a * u + b * v - 1) ** 2).sum()), a, b) for a, b in candidates)
    return Piece(float(a), float(b)), error
