"""Training steps of several ways that take turns, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

STEPS_OF_A_TURN = 3

Way = TypeVar("Way")


def step(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(ids, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begin


def turn(model: Any, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> list[float]:
    """Return the seconds of each step of a turn but the first."""
    return [step(model, optimizer, ids) for _ in range(STEPS_OF_A_TURN)][1:]


def medians(turns: Mapping[Way, Callable[[], list[float]]], rounds: int) -> dict[Way, float]:
    """Return the median seconds of each way over some rounds."""
    times: dict[Way, list[float]] = {way: [] for way in turns}
    for number in range(rounds + 1):
        for way, take in turns.items():
            found = take()
            if number:  # the first round makes the programs
                times[way] += found
    return {way: statistics.median(found) for way, found in times.items()}
