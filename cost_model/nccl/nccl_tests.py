"""Checked tables of nccl-tests.

Times are imported. Bandwidths only serve a check: busbw x time / size is a known function of the
number of ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from statistics import median

from autopar.core.common.files import read_file
from autopar.cost_model.cost import ClusterError
from autopar.cost_model.curves.curve import Curve
from autopar.cost_model.curves.measured_curve import CurveKey, Measured
from autopar.cost_model.group_shape import GroupShape
from autopar.cost_model.nccl.parsers import PROGRAMS, RawRow, RawRun, parse

_NAMES = {"alltoall": "all_to_all", "sendrecv": "send"}
_DTYPES = {"half": "float16", "float": "float32", "double": "float64"}
_BYTES = re.compile(r"\d+")
_STEADY = 1.5  # most ratio of times out of place and in place
_MOST_UNSTEADY = 0.1  # share of sizes
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class NcclTestsTable:
    """One run of one test program; texts are empty if unknown.

    Attributes:
        collective: one of `collectives.COLLECTIVES`, or another program of nccl-tests.
        ranks: number of ranks, checked against the ratio of busbw to time.
        bytes: message sizes, ascending.
        seconds: median time out of place of each size, in seconds.
        in_place_s: median seconds in place of each size; out of place where the file has none.
        least_bytes: smallest usable size in bytes.
        hardware: the file's description of the machines.
    """

    collective: str
    ranks: int
    ranks_per_node: int
    dtype: str
    bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    in_place_s: tuple[float, ...]
    least_bytes: int
    device: str
    version: str
    source: str
    hardware: str

    @property
    def usable(self) -> tuple[int, ...]:
        """Indices of usable sizes."""
        return tuple(i for i, size in enumerate(self.bytes) if size >= self.least_bytes)

    @property
    def unsteady(self) -> tuple[int, ...]:
        """Indices of usable sizes whose two timings differ by half or more."""
        pairs = {i: sorted((self.seconds[i], self.in_place_s[i])) for i in self.usable}
        return tuple(i for i, (fast, slow) in pairs.items() if slow >= _STEADY * fast)

    def curve(self) -> Curve:
        """The curve of the usable sizes, with the difference of the two timings as spread.

        Raises:
            ClusterError: too many sizes are unsteady. A few are left out.
        """
        usable, unsteady = self.usable, set(self.unsteady)
        if len(unsteady) > max(1, _MOST_UNSTEADY * len(usable)):
            worst = min(unsteady)
            raise ClusterError(
                f"{self.source}: the times do not repeat at {len(unsteady)} of {len(usable)} "
                f"sizes: {self.bytes[worst]} bytes take {self.seconds[worst]:g} s out of place, "
                f"{self.in_place_s[worst]:g} s in place. Measure again with more iterations, or "
                f"leave the small sizes out (least_bytes)"
            )
        steady = [i for i in usable if i not in unsteady]
        return Curve.smooth(
            [self.bytes[i] for i in steady],
            [self.seconds[i] for i in steady],
            [abs(self.seconds[i] - self.in_place_s[i]) for i in steady],
        )

    @property
    def key(self) -> CurveKey:
        """Key of the curve in a cluster."""
        return CurveKey(self.collective, GroupShape(self.ranks, self.ranks_per_node), self.dtype)

    def measured(self) -> Measured:
        """The curve and its origin."""
        left_out = "".join(f", {self.bytes[i]} bytes left out" for i in self.unsteady)
        if self.usable and self.usable[0] > 0:
            left_out = f", below {self.least_bytes} bytes left out" + left_out
        return Measured(self.curve(), f"imported from {self.source}{left_out}", self.version)


def read_tables(
    path: str | Path,
    *,
    collective: str | None = None,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    least_bytes: int | None = None,
) -> list[NcclTestsTable]:
    """The tables of a file that nccl-tests wrote: text of any launcher, JSON of `-J`, or CSV.

    Facts that the file lacks are arguments; none are guessed.

    Raises:
        ClusterError: the file is truncated, foreign or contradicts itself; the message says where.
    """
    path = Path(path)
    try:
        runs = parse(read_file(path).decode("utf-8"))
        if not runs:
            raise ClusterError("no table of nccl-tests: no line of '# size count type ... time'")
        for run in runs:
            run.collective = run.collective or collective or _named(path.stem)
            run.ranks = ranks or run.ranks or len(run.hosts) or None
            run.least_bytes = run.least_bytes if least_bytes is None else least_bytes
            run.source = run.source or path.name
        return [_table(run, ranks_per_node) for run in runs]
    except OSError as error:
        raise ClusterError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"{path}: not text: {error}") from error
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from error


def _named(stem: str) -> str | None:
    """The collective in a file name, such as a100_1x8_allreduce."""
    plain = stem.lower().replace("_", "").replace("-", "")
    hits = [name for name in PROGRAMS if name.replace("_", "") in plain]
    return max(hits, key=len) if hits else None


def _table(run: RawRun, ranks_per_node: int | None) -> NcclTestsTable:
    if not run.rows:
        raise ClusterError("the table has no rows")
    if not run.ended:
        raise ClusterError(
            f"line {run.rows[-1].line}: nothing follows this row, not the average bus bandwidth "
            f"that ends a table: was it cut short?"
        )
    if run.collective is None:
        raise ClusterError("the file does not say which collective: give it (collective)")
    collective = _NAMES.get(run.collective, run.collective)
    dtypes = {row.dtype for row in run.rows}
    if len(dtypes) > 1:
        raise ClusterError(f"several types in one table: {', '.join(sorted(dtypes))}")
    samples = _samples(run.rows)
    ranks = _ranks(collective, run.ranks, run.rows)
    sizes = tuple(sorted(samples))
    dtype = dtypes.pop()
    return NcclTestsTable(
        collective=collective,
        ranks=ranks,
        ranks_per_node=_ranks_per_node(run, ranks_per_node, ranks),
        dtype=_DTYPES.get(dtype, dtype),
        bytes=sizes,
        seconds=tuple(median(t for t, _ in samples[size]) for size in sizes),
        in_place_s=tuple(median(t for _, t in samples[size]) for size in sizes),
        least_bytes=run.least_bytes,
        device=run.device,
        version=run.version or "nccl, version not stated",
        source=run.source,
        hardware=run.hardware,
    )


def _samples(rows: Sequence[RawRow]) -> Mapping[int, list[tuple[float, float]]]:
    """Seconds out of place and in place, by size, without rows of 0 bytes."""
    samples: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        if not _BYTES.fullmatch(row.size):
            raise ClusterError(f"line {row.line}: the size is {row.size!r}")
        if row.wrong not in ("", "N/A") and _decimal(row, row.wrong, "number of wrong values") != 0:
            raise ClusterError(f"line {row.line}: {row.wrong} wrong values at {row.size} bytes")
        out = _seconds(row, row.time)
        inside = _seconds(row, row.in_place) if row.in_place not in ("", "N/A") else out
        if int(row.size):
            samples.setdefault(int(row.size), []).append((out, inside))
    if not samples:
        raise ClusterError("no size above 0 bytes")
    return samples


def _seconds(row: RawRow, text: str) -> float:
    value = _decimal(row, text, "time")
    if not (value.is_finite() and value > 0):
        raise ClusterError(f"line {row.line}: the time at {row.size} bytes is {text} us")
    return float(value) * 1e-6


def _decimal(row: RawRow, text: str, what: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        raise ClusterError(f"line {row.line}: the {what} is {text!r}, no number") from None


def _ranks_per_node(run: RawRun, given: int | None, ranks: int) -> int:
    nodes = len(set(run.hosts)) or run.nodes
    each = given or (ranks // nodes if nodes and ranks % nodes == 0 else None)
    if each is None:
        raise ClusterError("the file does not list the hosts: give ranks_per_node")
    each = min(each, ranks)
    if ranks % each:
        raise ClusterError(f"{ranks} ranks do not fill nodes of {each}")
    return each


def bus_factor(collective: str, ranks: int) -> float:
    """Busbw / algbw of nccl-tests: bytes over the busiest link for each byte of the message."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0


def _ranks(collective: str, stated: int | None, rows: Sequence[RawRow]) -> int:
    """The number of ranks, derived from or checked against the printed bandwidths."""
    low, high, line = 0.0, math.inf, 0
    for row in rows:
        least, most = _factor_bounds(row)
        if least > low:
            low, line = least, row.line
        high = min(high, most)
    if bus_factor(collective, 2) == 1.0 and bus_factor(collective, 3) == 1.0:
        if stated is None:
            raise ClusterError(f"a table of {collective} does not tell the ranks: give ranks")
        return stated
    fitting = _fitting(collective, low, high)
    if stated is None:
        if len(fitting) == 1:
            return fitting[0]
        raise ClusterError("the number of ranks is not in the file: give ranks")
    if stated not in fitting:
        seems = f"that of {fitting[0]} ranks" if len(fitting) == 1 else f"{low:.3f} to {high:.3f}"
        raise ClusterError(
            f"line {line}: busbw x time / size is {seems}, not the "
            f"{bus_factor(collective, stated):.3f} of {stated} ranks"
        )
    return stated


def _fitting(collective: str, low: float, high: float) -> range:
    """The numbers of ranks with a bus factor between `low` and `high`."""
    double = 2 if collective == "all_reduce" else 1
    if low >= double:
        return range(0)
    first = math.ceil(double / (double - low) - 1e-9)
    last = _MOST_RANKS if high >= double else math.floor(double / (double - high) + 1e-9)
    return range(max(1, first), last + 1)


def _factor_bounds(row: RawRow) -> tuple[float, float]:
    """Bounds of busbw x time / size, for figures rounded as printed."""
    try:
        speed, time = Decimal(row.busbw), Decimal(row.time)
    except InvalidOperation:
        return 0.0, math.inf
    if not int(row.size) or not speed.is_finite():
        return 0.0, math.inf
    half = [Decimal(5).scaleb(int(x.as_tuple().exponent) - 1) for x in (speed, time)]
    unit = 1000 / Decimal(row.size)  # GB/s x us
    low = (speed - half[0]) * (time - half[1]) * unit
    return float(low), float((speed + half[0]) * (time + half[1]) * unit)
