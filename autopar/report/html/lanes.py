"""`Lane`: one row of a timeline, with short pieces merged to limit their number."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from autopar.core.plan.prediction import Prediction
from autopar.core.plan.report_data import TimelineEvent
from autopar.cost_model.simulator.streams import COMPUTE
from autopar.report.event_names import EventNames

WIDTH = 1_000_000
"""Width of a step on a timeline, in units."""

MOST_PIECES = 6000
"""Maximum number of pieces of a timeline; short neighbours are merged beyond it."""

SHADES = 4
"""Number of shades of the stages of a rank, used in rotation."""


@dataclass(frozen=True)
class Piece:
    """One interval of a lane, in units of the timeline; `look` are the CSS classes."""

    start: int
    width: int
    name: str
    look: str


@dataclass(frozen=True)
class Lane:
    """One row of a timeline; `part` is 1 or 2 for a thin row under the full row before it."""

    name: str
    pieces: tuple[Piece, ...]
    part: int = 0


def lanes_of(p: Prediction) -> tuple[Lane, ...]:
    """Lanes of a predicted step, with at most `MOST_PIECES` pieces."""
    rows = _stages(p) if p.stages else _streams(p)
    least = 10
    while sum(len(row.pieces) for row in rows) > MOST_PIECES:
        least *= 2
        rows = [Lane(row.name, tuple(_merged(row.pieces, least)), row.part) for row in rows]
    return tuple(rows)


def place(at_s: float, step_s: float) -> int:
    """Position of a time on a timeline, in units."""
    return round(at_s / step_s * WIDTH) if step_s else 0


def _streams(p: Prediction) -> list[Lane]:
    """Lanes of blocks, compute, each mesh axis and each lower level of memory."""
    names_of = EventNames(p.events, p.report_data.calls)
    turn_s = min((s for _, phase, s, _ in p.report_data.spans if phase == "backward"), default=None)

    def look(row: TimelineEvent) -> str:
        name, stream, start_s, _, kind = row
        if stream != COMPUTE or kind == "wait":
            return kind.replace(" ", "_")
        if name == "optimizer":
            return "optimizer"
        return "forward" if turn_s is None or start_s < turn_s else "backward"

    blocks = tuple(
        _piece(block or "outside of blocks", start, end, phase, p.step_s)
        for block, phase, start, end in p.report_data.spans
    )
    names = sorted({row[1] for row in p.events}, key=lambda name: (name != COMPUTE, name))
    lanes = [Lane(name, _pieces(p, name, look, names_of.of)) for name in names]
    return [Lane("blocks", blocks), *lanes] if blocks else lanes


def _stages(p: Prediction) -> list[Lane]:
    """Lanes of each pipeline rank and its messages to neighbours."""
    ranks = len(p.idle)

    def look(row: TimelineEvent) -> str:
        if action := re.fullmatch(r"(\d+)([FBIW])\d+", row[0]):
            return f"{action[2]} s{int(action[1]) // ranks % SHADES}"
        return "optimizer" if row[0] == "optimizer" else "wait"

    found = []
    for rank in range(ranks):
        name = f"rank {rank}"
        found.append(Lane(name, _pieces(p, name, look)))
        others = {int(r[1].split()[-1]) for r in p.events if r[1].startswith(f"{name} to ")}
        for part, other in enumerate(sorted(others, key=lambda o: (o < rank, o)), 1):
            found.append(Lane(f"to {other}", _pieces(p, f"{name} to {other}", look), part))
    return found


def _pieces(
    p: Prediction,
    stream: str,
    look: Callable[[TimelineEvent], str],
    name: Callable[[TimelineEvent], str] = itemgetter(0),
) -> tuple[Piece, ...]:
    rows = (row for row in p.events if row[1] == stream)
    found = (_piece(name(row), row[2], row[3], look(row), p.step_s) for row in rows)
    return tuple(sorted(found, key=lambda piece: piece.start))


def _piece(name: str, start_s: float, end_s: float, look: str, step_s: float) -> Piece:
    start = place(start_s, step_s)
    return Piece(start, max(1, place(end_s, step_s) - start), name, look)


def _merged(pieces: Sequence[Piece], least: int) -> Iterable[Piece]:
    """Pieces, with neighbours of the same look merged if they are shorter than `least`."""
    for (short, _), run in groupby(pieces, key=lambda p: (p.width < least, p.look)):
        if not short:
            yield from run
            continue
        for _, near in groupby(run, key=lambda p: p.start // (2 * least)):
            yield _joined(list(near))


def _joined(pieces: Sequence[Piece]) -> Piece:
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return first
    name = f"{first.name.split(' … ')[0]} … {last.name.split(' … ')[-1]}"
    return Piece(first.start, last.start + last.width - first.start, name, first.look)
