"""`warn_once`: warnings of autopar, once a process, on rank 0, at the user's line; and `say`."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import torch
from torch import distributed as dist

from autopar.errors import AutoparWarning, NumericsWarning

ISSUED: set[tuple[type[AutoparWarning], str]] = set()
"""Warnings issued by this process."""

_ROOT = Path(__file__).resolve().parents[2]
_LINKED = (_ROOT.parent / "passes", _ROOT.parent / "cost_model")
_TORCH = Path(torch.__file__).resolve().parent
_INSIDE = tuple(f"{folder}{os.sep}" for folder in (_ROOT, *_LINKED, _TORCH))


class NumericsNote(str):
    """A note on a graph: a result differs from training on a single device.

    `TrainingGraph.notes` and `Plan.notes` hold such notes and plain text. A module that runs the
    graph also issues the note as a NumericsWarning.
    """

    __slots__ = ()


class BorderNote(str):
    """A note on a graph: what it costs to return rows of the whole batch, and what avoids it."""

    __slots__ = ()


def warn_once(category: type[AutoparWarning], message: str) -> None:
    """Issues a warning on rank 0, once in this process, at the line that called autopar.

    Every rank calls it: a filter that turns the warning into an error raises on every rank.
    """
    if (category, message) in ISSUED:
        return
    ISSUED.add((category, message))
    if _rank() == 0:
        warnings.warn(message, category, stacklevel=_levels_to_user())
        return
    with warnings.catch_warnings(record=True):  # filters still apply: "error" raises here too
        warnings.warn(message, category, stacklevel=2)


def warn_of_notes(notes: Iterable[str], *, trains: bool) -> None:
    """Issues a NumericsWarning for every `NumericsNote`, and in training for each `BorderNote`."""
    for note in notes:
        if isinstance(note, NumericsNote):
            warn_once(NumericsWarning, f"autopar differs from one device: {note}")
        elif isinstance(note, BorderNote) and trains:
            warn_once(AutoparWarning, str(note))


def say(text: str) -> None:
    """Prints a line on rank 0, to people who wait."""
    if _rank() == 0:
        print(f"autopar: {text}", file=sys.stderr, flush=True)


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _levels_to_user() -> int:
    """Frames from the caller of this function up to the first outside of autopar and torch."""
    level, frame = 1, sys._getframe(1)
    while is_inside(frame) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level if not is_inside(frame) else 2


def is_inside(frame: FrameType) -> bool:
    """Whether a frame runs code of autopar or torch."""
    return os.path.realpath(frame.f_code.co_filename).startswith(_INSIDE)
