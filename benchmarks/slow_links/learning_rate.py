"""The learning rate of a step: constant, or a linear warm-up before a cosine to a tenth."""

from __future__ import annotations

import math


def learning_rate(step: int, steps: int, lr: float, warm_up: int | None) -> float:
    """Return the rate of `step`, counted from 1; without `warm_up` steps it stays `lr`."""
    if warm_up is None:
        return lr
    if step <= warm_up:
        return lr * step / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
