"""Levels of activation checkpointing."""

from __future__ import annotations

from typing import Literal, get_args

Level = Literal["none", "regather", "selective", "full", "everything"]

ALL_LEVELS: tuple[Level, ...] = get_args(Level)
"""All levels, in order of decreasing memory."""

LEVELS: tuple[Level, ...] = ("none", "selective", "full")
"""Levels that the planner tries, in order of decreasing memory."""

PARTITIONED_LEVELS: tuple[Level, ...] = ALL_LEVELS
"""Levels that it tries where ranks send each other activations."""
