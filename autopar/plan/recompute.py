"""Levels of activation recomputation."""

from __future__ import annotations

from typing import Literal

Level = Literal["none", "regather", "selective", "full", "everything"]


LEVELS: tuple[Level, ...] = ("none", "selective", "full")
"""Those that are tried, each keeping less than the one before."""
