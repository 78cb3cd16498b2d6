"""Levels of activation checkpointing."""

from __future__ import annotations

from typing import Literal

Level = Literal["none", "regather", "selective", "full", "everything"]


LEVELS: tuple[Level, ...] = ("none", "selective", "full")
"""Levels that the planner tries, in order of decreasing memory."""
